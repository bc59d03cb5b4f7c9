"""Whole runs whose rewards come from a verifier and a reward model, and from a judge that goes away."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.functional.judge_servers import KEY, MODEL, judge_server
from tests.functional.reward_models import decoder
from tests.functional.runs import CONFIG, ROOT, FinishedRun, run_grpo, running, wait_for_step

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_run]

VARIABLE = "KEY_OF_THE_JUDGE"
WEIGHTS = {"arithmetic": 2.0, "quality": 0.5, "even": 0.25}  # even abstains for half of the problems
SMALL = {
    "grpo": {"num_prompts_per_step": 16, "val_at_start": False, "val_at_end": False, "val_period": 0},
    "policy": {"data_parallel_size": 1, "train_global_batch_size": 64},
    "generation": {"num_engines": 1},
    "data_plane": {"backend": "in_memory"},
    "checkpointing": {"export_final_hf": False},
    "logger": {"wandb": {"mode": "disabled"}},
    "data": {"default": {"env": "task"}, "train": {"env": "task"}, "validation": {"env": "task"}},
}


def configuration(directory: Path, env: dict[str, Any], kinds: dict[str, str], **others: Any) -> str:
    """The demo made small, with these environments besides its own; a configuration's path."""
    groups = [{f"{ROOT}/configs/env@env.{name}": kind} for name, kind in kinds.items()]
    layers = {"small": SMALL, "settings": {"env": env, **others}}
    for name, layer in layers.items():
        (directory / f"{name}.yaml").write_text(yaml.safe_dump(layer))
    path = directory / "run.yaml"
    path.write_text(yaml.safe_dump({"defaults": [str(ROOT / CONFIG), *groups, *layers]}))
    return str(path)


def judged_by(url: str, **others: Any) -> dict[str, Any]:
    options = {
        "base_url": f"{url}/v1",
        "model": MODEL,
        "api_key_variable": VARIABLE,
        "score_pattern": "score=(.)",
        "max_score": 9.0,
        "max_tokens": 12,
        "extra_body": {"structured_outputs": {"regex": "score=[0-9]"}},
    }
    return {"task": {"options": options, **others}}


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory, arithmetic_model: str) -> FinishedRun:
    directory = tmp_path_factory.mktemp("mixed")
    reward_model = decoder(directory / "reward_model", has_template=True)
    env = {
        "quality": {"batch_size": 16, "options": {"model_name": str(reward_model)}},
        "even": {"options": {"function": "tests.functional.uniform_rewards:of_even_sums"}},
        "task": {"options": {"components": WEIGHTS}},
    }
    kinds = {"quality": "reward_model", "even": "function", "task": "weighted_sum"}
    gdpo = {"name": "gdpo", "reward_weights": {"arithmetic": 1.0, "quality": 0.1, "even": 0.2}}
    # At such a temperature some answers are longer than the limit, and do not train.
    grpo = {"max_num_steps": 3, "adv_estimator": gdpo, "overlong_filtering": True}
    others = {"rollout": {"dump_period": 1}, "generation": {"temperature": 2.0}}
    return run_grpo(directory, config=configuration(directory, env, kinds, grpo=grpo, **others))


def samples_of(run: FinishedRun, step: int) -> list[dict[str, Any]]:
    """What the dump says of a step's samples."""
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_verifier_and_a_reward_model_reward_together(mixed: FinishedRun) -> None:
    assert mixed.returncode == 0, mixed.output
    assert len(mixed.metrics("train/loss")) == 3
    assert mixed.metrics("train/num_failed_rewards") == [0, 0, 0]
    right, quality, even = (mixed.metrics(f"train/env/task/reward/{name}") for name in WEIGHTS)
    judged = [1.0 - share for share in mixed.metrics("train/env/task/abstained_share/even")]
    assert len(judged) == 3
    assert all(0 < share < 1 for share in judged)
    exact = mixed.metrics("train/env/task/arithmetic/reward/exact_match")
    scores = mixed.metrics("train/env/task/quality/reward/score")
    assert right == pytest.approx([2.0 * one for one in exact])
    assert quality == pytest.approx([0.5 * one for one in scores])
    assert mixed.metrics("train/reward") == pytest.approx(
        [a + b + c * share for a, b, c, share in zip(right, quality, even, judged, strict=True)]
    )
    assert all(0 < one < 1 for one in exact)


def test_every_sample_has_all_components_and_an_advantage_from_them(mixed: FinishedRun) -> None:
    samples = samples_of(mixed, 3)
    assert len(samples) == 16 * 8
    for sample in samples:
        assert sample["rewards"].keys() == WEIGHTS.keys()
        assert (sample["rewards"]["even"] is None) == (int(sample["answer"][0]) % 2 == 1)
        assert sample["reward"] == pytest.approx(sum(one or 0.0 for one in sample["rewards"].values()))
        assert sample["rewards"]["arithmetic"] in (0.0, 2.0)
    assert any(sample["advantage"] for sample in samples)


def test_metrics_of_rewards_are_those_of_all_judged_samples_also_of_those_that_do_not_train(
    mixed: FinishedRun,
) -> None:
    for record in mixed.records():
        samples = samples_of(mixed, int(record["step"]))
        masked = [sample for sample in samples if not sample["sample_mask"]]
        assert 0 < len(masked) == record["train/num_overlong_filtered"] < len(samples)
        assert all(sample["is_judged"] and sample["outcome"] == "overlong" for sample in masked)
        rewards = [sample["reward"] for sample in samples]
        for name in ("reward", "filtered_reward", "shaped_reward"):
            assert record[f"train/{name}"] == pytest.approx(np.mean(rewards))
        kept = np.mean([sample["reward"] for sample in samples if sample["sample_mask"]])
        assert abs(record["train/reward"] - kept) > 0.01  # what the samples that train would give


def test_the_spread_within_groups_is_told_of_the_reward_and_of_each_component(mixed: FinishedRun) -> None:
    for record in mixed.records():
        samples = samples_of(mixed, int(record["step"]))
        of = "train/env/task/"
        assert record["train/baseline_reward/pct_mixed"] == 100 - record["train/baseline_reward/pct_uniform"]
        for name, suffix in {"": "", **{name: f"/{name}" for name in WEIGHTS}}.items():
            values = [one["rewards"][name] if name else one["reward"] for one in samples]
            # A component that abstains does so for a whole group; the dump is by (group, generation).
            groups = np.array([one for one in values if one is not None]).reshape(-1, 8)
            assert len(groups) == 16 or (0 < len(groups) < 16 == len(values) / 8 and name == "even")
            is_uniform = (groups == groups[:, :1]).all(axis=1)
            std, uniform = groups.std(axis=1, ddof=1).mean(), 100 * is_uniform.mean()
            assert record[f"{of}reward_std{suffix}"] == pytest.approx(std)
            assert record[f"{of}baseline_reward/pct_uniform{suffix}"] == pytest.approx(uniform)
            if not name:
                assert record["train/reward_std"] == pytest.approx(std)
                assert record["train/baseline_reward/pct_uniform"] == pytest.approx(uniform)


def test_the_console_shows_components_length_and_truncated_responses(mixed: FinishedRun) -> None:
    for record in mixed.records():
        parts = {name: record[f"train/env/task/reward/{name}"] for name in sorted(WEIGHTS)}
        shown = ", ".join(f"{name} {value:.3f}" for name, value in parts.items())
        length, cut = record["train/mean_gen_tokens_per_sample"], record["train/truncation_rate"]
        assert (
            f"step {record['step']}/3  reward {record['train/reward']:.3f} ({shown})  "
            f"length {length:.1f}  truncated {cut:.1%}  loss "
        ) in mixed.output


@pytest.mark.slow
def test_a_run_with_a_judge_that_is_not_there_ends_before_it_trains(
    tmp_path: Path, arithmetic_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    config = configuration(tmp_path, judged_by("http://127.0.0.1:9"), {"task": "judge"})
    run = run_grpo(tmp_path, ["grpo.max_num_steps=2"], config=config)
    assert run.returncode == 1
    assert "env.task (kind=judge) was asked once before training, and gave no reward" in run.output
    assert "answer: unreachable: the judge tiny-judge at http://127.0.0.1:9/v1 gave" in run.output
    assert "start the server, or correct env.task.options" in run.output
    assert KEY not in run.output


@pytest.mark.slow
def test_a_run_trains_on_a_served_judge_and_ends_when_the_judge_dies(
    tmp_path: Path, arithmetic_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, KEY)
    with judge_server(tmp_path) as server:
        config = configuration(tmp_path, judged_by(server.url), {"task": "judge"})
        with running(tmp_path, ["grpo.max_num_steps=300"], config=config) as (process, _, run_dir):
            wait_for_step(process, run_dir, 2, timeout_s=400)
            server.end()
            output, _ = process.communicate(timeout=300)
    assert process.returncode == 3, output
    assert "APIConnectionError" in output
    assert "env.task.max_failed_share" in output
