"""Several validation sets, several answers to each problem, and an early stop, over the real components."""

from __future__ import annotations

import json

import pytest

from tests.functional.runs import FinishedRun
from tests.functional.validated_run import NUM_ANSWERS, NUM_PROBLEMS

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]


def test_the_run_stops_when_a_validation_reaches_its_goal(validated: FinishedRun) -> None:
    (record,) = validated.records()
    assert record["validation/pairs/pass@4"] >= 0.01
    assert "stopped after step 1: grpo.val_stop_threshold is reached" in validated.output


def test_the_ratio_is_to_what_the_engine_sampled_with(validated: FinishedRun) -> None:
    (record,) = validated.records()
    assert 1 <= record["train/token_mult_prob_error"] < 1.001
    assert record["train/probs_ratio"] == pytest.approx(1, abs=1e-4)  # one update
    assert "data_plane/write/prev_logprobs/bytes" not in record


def test_every_set_has_metrics_of_its_own_beside_those_of_all(validated: FinishedRun) -> None:
    (record,) = validated.records()
    sizes = [record[f"validation/{name}num_samples"] for name in ("pairs/", "file/", "")]
    assert sizes == [NUM_PROBLEMS * NUM_ANSWERS, NUM_PROBLEMS * NUM_ANSWERS, 2 * NUM_PROBLEMS * NUM_ANSWERS]
    for key in ("accuracy", "pass@1", "pass@2", "pass@4", "mean@4", "majority@4"):
        parts = [record[f"validation/{name}/{key}"] for name in ("pairs", "file")]
        assert record[f"validation/{key}"] == pytest.approx(sum(parts) / 2)
    assert record["validation/pass@1"] == pytest.approx(record["validation/mean@4"])
    assert record["validation/pass@1"] < record["validation/pass@4"]


def test_training_prompts_are_mixed_by_weight_and_too_long_ones_are_left_out(validated: FinishedRun) -> None:
    lines = (validated.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 32
    assert sum(prompt.endswith("1+21=") for prompt in prompts) == 8
    assert max(map(len, prompts)) == 6
    assert "data.train file: 30 problems, 10 too long" in validated.output


def test_validation_answers_are_in_the_files_of_wandb(validated: FinishedRun) -> None:
    tables = list(
        (validated.run_dir / "wandb").glob("offline-run-*/files/media/table/validation/answers*.json")
    )
    assert len(tables) == 1
    assert len(json.loads(tables[0].read_text())["data"]) == 4
