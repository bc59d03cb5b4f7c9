"""Calibration by what a run left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.observability.rollout_times import (
    RolloutTimes,
    SampleTimes,
    TurnTimes,
    append_rollout_times,
)
from nemo_like_tools.what_if.calibration import (
    UnfitRun,
    fitted_speed,
    least_squares,
    read_run,
    requests_of,
    step_work,
)
from nemo_like_tools.what_if.workload import Mode, TurnWork

CONFIG = {
    "grpo": {
        "num_prompts_per_step": 2,
        "num_generations_per_prompt": 2,
        "num_epochs_per_rollout": 1,
        "max_staleness": 0,
        "weight_updates": "between_samples",
    },
    "policy": {"data_parallel_size": 2, "train_global_batch_size": 2},
    "generation": {"num_engines": 1, "vllm_cfg": {"max_num_seqs": 8}},
}
METRICS = {
    "timing/train/total_step_time": 10.0,
    "timing/train/weight_sync": 0.5,
    "timing/train/generation": 4.0,
    "timing/train/rollout_put": 0.25,
    "timing/train/logprobs": 1.0,
    "timing/train/policy_training": 3.0,
    "performance/worker_compute_s": 3.0,
    "weight_sync/weight_sync_s": 0.4,
    "train/dynamic_sampling_num_uniform": 1.0,
}


def sample(*turns: TurnTimes) -> SampleTimes:
    return SampleTimes(5 + sum(turn.num_tokens for turn in turns), turns)


def together(*lengths: int, came_s: float, judged_s: tuple[float, ...]) -> tuple[SampleTimes, ...]:
    """Samples that were one request, asked for at 0."""
    return tuple(
        sample(TurnTimes(0.0, length, came_s, judged))
        for length, judged in zip(lengths, judged_s, strict=True)
    )


def rollout(*groups: tuple[SampleTimes, ...], step: int = 1, began_s: float = 100.0) -> RolloutTimes:
    return RolloutTimes(step=step, first_group=0, began_s=began_s, groups=groups)


def test_the_speed_of_an_engine_is_found_again() -> None:
    # 0.1 s, then 0.01 s a token and 0.002 s more for each running sequence: alone 0.012 s, in fours 0.018 s.
    alone = [rollout((sample(TurnTimes(0.0, n, 0.1 + 0.012 * n, 9.0)),), began_s=20.0 * n) for n in (10, 50)]
    fours = [
        rollout(together(n, n, n, n, came_s=0.1 + 0.018 * n, judged_s=(9.0,) * 4), began_s=1000.0 + 20 * n)
        for n in (10, 40)
    ]
    speed = fitted_speed([requests_of(0, 1, [*alone, *fours])], max_num_seqs=8)
    assert speed.request_s == pytest.approx(0.1)
    assert speed.token_s == pytest.approx(0.01)
    assert speed.token_per_sequence_s == pytest.approx(0.002)


def test_the_time_for_which_a_request_waits_for_room_is_not_the_engines_pace() -> None:
    turns = [TurnTimes(0.0, 10, 0.5 * place, 9.0) for place in (1, 2, 3)]
    one_by_one = rollout(*((sample(turn),) for turn in turns))
    speed = fitted_speed([requests_of(0, 1, [one_by_one])], max_num_seqs=1)
    assert speed.request_s + 10 * speed.token_time_s(1) == pytest.approx(0.5)


def test_engines_have_the_groups_that_were_dealt_to_them() -> None:
    groups = [(sample(TurnTimes(0.0, length, 1.0, 1.0)),) for length in (1, 2, 3)]
    lengths = [[one.lengths for one in requests_of(engine, 2, [rollout(*groups)])] for engine in (0, 1)]
    assert lengths == [[(1,), (3,)], [(2,)]]


def test_a_step_is_divided_into_what_happens_inside_the_models_and_the_rest() -> None:
    group = together(3, 4, came_s=1.0, judged_s=(1.5, 2.0))
    work = step_work(METRICS, [rollout(group, group)])
    # 3 of the 4 seconds of both stages are inside the models.
    assert (work.scoring_s, work.training_s, work.calls_s) == (0.75, 2.25, 1.0)
    assert (work.put_s, work.driver_s) == (0.25, pytest.approx(10 - 4 - 4 - 0.4))
    assert work.begin_s == 4.0 - 2.0 - 0.25
    assert work.wasted_share == 0.25
    assert work.groups[0].is_one_request
    assert [one.turns for one in work.groups[0].samples] == [(TurnWork(3, 0.5),), (TurnWork(4, 1.0),)]


@given(st.tuples(*[st.integers(min_value=0, max_value=50)] * 3))
def test_coefficients_that_fit_exactly_are_found(wanted: tuple[int, int, int]) -> None:
    rows = [(1.0, 3.0, 4.0), (1.0, 10.0, 7.0), (1.0, 2.0, 50.0), (1.0, 30.0, 11.0)]
    values = [sum(w * x for w, x in zip(wanted, row, strict=True)) for row in rows]
    assert least_squares(rows, values) == pytest.approx(wanted, abs=1e-5)


def test_no_coefficient_is_below_zero() -> None:
    assert least_squares([(1.0, 1.0, 0.0), (1.0, 2.0, 0.0)], [2.0, 1.0]) == pytest.approx((1.5, 0.0, 0.0))


def write_run(directory: Path, config: dict[str, Any] = CONFIG, num_steps: int = 6) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    group = together(3, 4, came_s=1.0, judged_s=(1.5, 2.0))
    lines = []
    for step in range(1, num_steps + 1):
        total_s = 100.0 if step < 3 else 10.0
        lines.append(json.dumps({"step": step, **METRICS, "timing/train/total_step_time": total_s}))
        one = rollout(group, group, step=step, began_s=20.0 * step)
        append_rollout_times(directory / "rollout_times.jsonl", one)
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_a_run_is_read_without_its_first_steps(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run"))
    assert len(run.works) == 4
    assert run.measured_step_s == 10.0
    assert (run.num_engines, run.mode) == (1, Mode())
    assert (run.trainer.num_replicas, run.trainer.updates_per_step, run.trainer.num_stage_calls) == (2, 2, 2)
    assert run.trainer.weight_sync_s == 0.4


def test_the_mode_of_the_run_is_read(tmp_path: Path) -> None:
    grpo = {**CONFIG["grpo"], "max_staleness": 2, "weight_updates": "in_flight"}
    run = read_run(write_run(tmp_path / "run", {**CONFIG, "grpo": grpo}))
    assert run.mode == Mode(max_staleness=2, weight_updates=WeightUpdates.in_flight)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("config.yaml", "no config.yaml; name the directory of a run"),
        ("metrics.jsonl", "no metrics.jsonl"),
        ("rollout_times.jsonl", "rollout.record_times=true"),
    ],
)
def test_what_is_missing_is_named_with_its_remedy(tmp_path: Path, name: str, said: str) -> None:
    run = write_run(tmp_path / "run")
    (run / name).unlink()
    with pytest.raises(UnfitRun, match=said):
        read_run(run)


def test_a_run_whose_stages_overlapped_is_refused(tmp_path: Path) -> None:
    grpo = {**CONFIG["grpo"], "overlap": "exact"}
    with pytest.raises(UnfitRun, match=r"name a run with grpo\.overlap=off"):
        read_run(write_run(tmp_path / "run", {**CONFIG, "grpo": grpo}))


def test_a_run_of_agents_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitRun, match=r"env\.sums\.kind=agent, and the times .*; name a run without agents"):
        read_run(write_run(tmp_path / "run", {**CONFIG, "env": {"sums": {"kind": "agent"}}}))


def test_a_run_whose_samples_waited_for_later_steps_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnfitRun, match=r"rollout\.max_tokens_per_step=2 samples waited"):
        read_run(write_run(tmp_path / "run", {**CONFIG, "rollout": {"max_tokens_per_step": 2}}))


def test_a_run_without_steps_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text('{"step": 0, "validation/accuracy": 0.5}\n')
    with pytest.raises(UnfitRun, match="no step has both"):
        read_run(run)


@pytest.mark.parametrize(
    "content", [b"\xff\xfe\x00", b"a: [", b"5", b"grpo: {}", b"grpo: {}\npolicy: {}\ngeneration: {}"]
)
def test_a_damaged_configuration_is_refused_with_its_name(tmp_path: Path, content: bytes) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_bytes(content)
    with pytest.raises(UnfitRun, match=r"config\.yaml .*name "):
        read_run(run)


def test_damaged_lines_are_left_out_with_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run")
    whole = read_run(run)
    for name in ("metrics.jsonl", "rollout_times.jsonl"):
        (run / name).write_bytes(b"\xff\n" + (run / name).read_bytes())
    assert read_run(run) == whole
    said = capsys.readouterr().err
    assert f"warning: {run / 'metrics.jsonl'}:1 is no line of metrics" in said
    assert f"warning: {run / 'rollout_times.jsonl'}:1 is no line of rollout times" in said
