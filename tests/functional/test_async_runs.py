"""Runs that train while rollouts are under way: exact overlap, bounded staleness, journals, deaths."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import (
    FEWEST_PROCESSES,
    FinishedRun,
    kill_all,
    read_metrics,
    run_grpo,
    running,
    wait_for_step,
    wait_until_gone,
)

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(600)]

NO_VALIDATION = ("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0")
SMALL = [
    *("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=4", "grpo.samples_kept_together=1"),
    *("policy.train_global_batch_size=32", "policy.sequence_packing.share_prompts=false"),
    *("checkpointing.export_final_hf=false", "logger.wandb.mode=disabled"),
]
EXACT = "grpo.overlap=exact"
# Tokens of one response are then of several versions: sampling lasts as long as some training.
AHEAD = ["grpo.max_staleness=2"]
IN_FLIGHT = [*AHEAD, "grpo.weight_updates=in_flight", "generation.vllm_cfg.max_num_seqs=8"]
# Rounding, which the order of additions changes; what grows with it is compared in the first step alone.
ROUNDED = ("train/loss", "train/grad_norm")


def finished(directory: Path, *overrides: str, name: str | None = None) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, *overrides], name)
    assert run.returncode == 0, run.output
    return run


def without_timings(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step but for seconds, and how busy processes were."""
    return [
        {name: value for name, value in without_measurements(record).items() if not _is_of_timing(name)}
        for record in read_metrics(run_dir)
    ]


def _is_of_timing(name: str) -> bool:
    return name.startswith(("performance/", "timing/", "weight_sync/"))


# The demo has two workers and two engines, and TransferQueue between them.
WITH_TWO_ENGINES = pytest.param(("policy.data_parallel_size=1",), marks=pytest.mark.slow, id="two engines")
WITH_TWO_OF_EACH = pytest.param((), marks=pytest.mark.slow, id="two of each")
WITH_FEWEST = pytest.param(FEWEST_PROCESSES, id="fewest processes")


@pytest.mark.parametrize("processes", [WITH_FEWEST, WITH_TWO_ENGINES])
def test_exact_overlap_trains_as_a_run_that_alternates(
    arithmetic_model: str, tmp_path: Path, processes: tuple[str, ...]
) -> None:
    # An engine that samples a part of the groups at once ends them one after the other.
    options = ["grpo.max_num_steps=3", "generation.vllm_cfg.max_num_seqs=8", *processes, *NO_VALIDATION]
    alternating = finished(tmp_path / "alternating", *options)
    run = finished(tmp_path / "exact", *options, EXACT)
    journal = (run.run_dir / "journal/after-00000/driver.jsonl").read_text()
    assert journal.count('"event": "part"') > 3
    for name in ROUNDED:
        assert run.metrics(name) == pytest.approx(alternating.metrics(name), rel=1e-4, abs=1e-6)
    assert run.metrics("train/reward") == alternating.metrics("train/reward")


LAYOUTS = {
    "DP2": ["policy.data_parallel_size=2"],
    "TP2": ["policy.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2"],
    "PP2": ["policy.data_parallel_size=1", "policy.megatron_cfg.pipeline_model_parallel_size=2"],
    "FSDP": ["policy.data_parallel_size=2", "policy.backend=fsdp"],
}


@pytest.fixture(scope="module")
def ten_steps(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """What replays need of a run of ten steps that recorded its rollouts."""
    run = finished(
        tmp_path_factory.mktemp("recorded"), "grpo.max_num_steps=10", "rollout.record=true", *NO_VALIDATION
    )
    return f"rollout.replay={run.run_dir / 'recorded'}"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_ten_steps_of_recorded_rollouts_end_in_the_same_weights(
    ten_steps: str, tmp_path: Path, layout: str
) -> None:
    weights = []
    for overlap in ("off", "exact"):
        options = [f"grpo.overlap={overlap}", "checkpointing.export_final_hf=true", *LAYOUTS[layout]]
        run = finished(tmp_path / overlap, "grpo.max_num_steps=10", ten_steps, *options, *NO_VALIDATION)
        files = (run.run_dir / "final_hf").glob("*.safetensors")  # one of each stage of a pipeline
        tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
        weights.append(torch.cat([tensors[name].flatten() for name in sorted(tensors)]))
    off, exact = weights
    assert float((exact - off).norm() / off.norm()) < 1e-5


@pytest.mark.parametrize("processes", [WITH_FEWEST, WITH_TWO_OF_EACH])
def test_a_run_that_follows_the_journal_of_another_has_its_metrics_to_the_bit(
    arithmetic_model: str, tmp_path: Path, processes: tuple[str, ...]
) -> None:
    options = ["grpo.max_num_steps=6", *IN_FLIGHT, EXACT, *processes, *NO_VALIDATION]
    first = finished(tmp_path / "first", *options)
    second = finished(tmp_path / "second", *options, f"rollout.follow_journal={first.run_dir}")
    # How far rollouts run ahead goes by how busy the machine is; they always begin before the update that
    # their step waits for.
    assert max(first.metrics("train/max_staleness")) >= 1
    assert without_timings(second.run_dir) == without_timings(first.run_dir)


@pytest.mark.slow
def test_a_run_that_was_killed_and_continues_follows_its_own_journal(
    arithmetic_model: str, tmp_path: Path
) -> None:
    options = ["grpo.max_num_steps=8", "checkpointing.save_period=3", *IN_FLIGHT, *NO_VALIDATION]
    with running(tmp_path, [*SMALL, *options]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, 5)
        kill_all(mark)
        process.communicate(timeout=60)
    before = _by_step(without_timings(run_dir))
    assert wait_until_gone(mark) == []
    run = finished(tmp_path, *options, name=mark)
    after = _by_step(without_timings(run.run_dir))
    assert sorted(after) == list(range(1, 9))
    assert {step: after[step] for step in before} == before


def _by_step(records: list[dict[str, Any]]) -> Mapping[int, dict[str, Any]]:
    return {int(record["step"]): record for record in records}


# Of rollouts that run ahead, the kill goes by the newest.
@pytest.mark.parametrize(
    ("mode", "steps"),
    [
        pytest.param([EXACT], (2, 3, 4), marks=pytest.mark.slow, id="exact"),
        pytest.param(AHEAD, (3, 4, 5), marks=pytest.mark.slow, id="ahead"),
        pytest.param(IN_FLIGHT, (3, 4, 5), marks=pytest.mark.slow, id="in flight"),
    ],
)
def test_processes_that_die_are_replaced_and_nothing_is_trained_twice_or_lost(
    arithmetic_model: str, tmp_path: Path, mode: list[str], steps: tuple[int, ...]
) -> None:
    victims = zip(("engine-1", "rollout", "environment"), steps, strict=True)
    plan = [f"{victim}:generation@{step}" for victim, step in victims]
    output, run_dir = killed_run(tmp_path, plan, "grpo.max_num_steps=5", *mode)
    assert "(recovery 3 of 10)" in output, output
    check_each_step_once(run_dir, 5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [[EXACT], IN_FLIGHT], ids=["exact", "in flight"])
def test_storage_that_dies_is_replaced_and_a_worker_starts_all_again_from_the_checkpoint(
    arithmetic_model: str, tmp_path: Path, mode: list[str]
) -> None:
    plan = [
        *("ray::SimpleStorageUnit:logprobs@3", "ray::TransferQueueController:train@4"),
        "policy_worker-1:train@7",
    ]
    options = ["grpo.max_num_steps=8", "checkpointing.save_period=4", "cluster.max_restarts=1"]
    output, run_dir = killed_run(tmp_path, plan, *options, *mode)
    assert "(recovery 2 of 10)" in output, output
    assert "(restart 1 of 1)" in output, output
    check_each_step_once(run_dir, 8)


def killed_run(tmp_path: Path, plan: list[str], *options: str) -> tuple[str, Path]:
    """A run that ends well, and leaves nothing, although its processes were killed by this plan."""
    program = ["-m", "tests.functional.killing_run", ",".join(plan)]
    with running(tmp_path, [*SMALL, *options, *NO_VALIDATION], program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=550)
    assert process.returncode == 0, output
    assert wait_until_gone(mark) == []
    return output, run_dir


def check_each_step_once(run_dir: Path, num_steps: int) -> None:
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == [*range(1, num_steps + 1)]
    assert all(record["train/policy_version"] <= record["step"] - 1 for record in records)


@pytest.mark.slow
def test_rollouts_wait_for_a_trainer_that_is_slow(arithmetic_model: str, tmp_path: Path) -> None:
    options = ["grpo.max_num_steps=6", "grpo.max_staleness=2", *NO_VALIDATION]
    slow = ["loss_fn.kind=tests.functional.own_losses:slow", "++loss_fn.arguments.seconds=1.0"]
    run = finished(tmp_path, *options, *slow)
    under_way, most = set(), 0
    for line in (run.run_dir / "journal/after-00000/driver.jsonl").read_text().splitlines():
        match json.loads(line):
            case {"event": "begin", "rollout": name}:
                under_way.add(name)
                most = max(most, len(under_way))
            case {"event": "trained", "step": step}:
                under_way.remove(f"training/{step}/0")
    assert most == 3  # the step's own, and two that are ahead
    # A step's two updates sleep for two seconds or more, and the rollouts ahead are over before. The last one
    # begins with step 4.
    assert run.metrics("performance/backpressure_s")[3] > 0.5


@pytest.mark.slow
def test_samples_that_use_up_their_tokens_go_on_in_later_steps_also_by_a_journal(
    arithmetic_model: str, tmp_path: Path
) -> None:
    options = ["grpo.max_num_steps=5", "grpo.max_staleness=2", "rollout.max_tokens_per_step=1"]
    first = finished(tmp_path / "first", *options, *NO_VALIDATION)
    num_samples = 16 * 4
    assert first.metrics("train/max_staleness") == [0, 1, 2, 2, 2]
    # A rollout that began two steps ahead got one token a sample in each of these; few end with the first.
    (oldest, newer) = (first.metrics(f"train/num_tokens_of_staleness/{age}")[-1] for age in (2, 1))
    assert oldest == num_samples
    assert 0.8 * num_samples < newer == first.metrics("train/num_continued_samples")[-1] <= num_samples
    second = finished(
        tmp_path / "second", *options, *NO_VALIDATION, f"rollout.follow_journal={first.run_dir}"
    )
    assert without_timings(second.run_dir) == without_timings(first.run_dir)
