"""Several validation sets, several answers to each problem, and an early stop, over the real components."""

from __future__ import annotations

import json

import pytest

from tests.functional.runs import FinishedRun, run_grpo

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

NUM_PROBLEMS, NUM_ANSWERS, NUM_STEPS = 24, 4, 20


@pytest.fixture(scope="module")
def run(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two training sources 3 to 1, one of which has prompts that are too long; two validation sets; stops as
    soon as any problem of the easy one is solved by any of four answers. Nothing is scored first."""
    directory = tmp_path_factory.mktemp("sets")
    problems = directory / "problems.jsonl"
    with problems.open("w") as file:
        for number in range(40):
            prompt = f"{number % 10}1+21=" if number < 30 else "1" * 60 + "="
            file.write(json.dumps({"prompt": prompt, "answer": f"{(number % 10) + 2}20"}) + "\n")
    return run_grpo(
        directory,
        [
            "data.train=[{name: pairs, weight: 3}, "
            f"{{name: file, kind: jsonl, path: {problems}, env: arithmetic}}]",
            f"data.validation=[{{name: easy}}, {{name: file, kind: jsonl, path: {problems}}}]",
            f"grpo.max_num_steps={NUM_STEPS}",
            "grpo.num_prompts_per_step=16",
            "grpo.num_generations_per_prompt=2",
            "grpo.val_at_start=false",
            "grpo.val_period=1",
            f"grpo.max_val_samples={NUM_PROBLEMS}",
            f"grpo.num_val_generations_per_prompt={NUM_ANSWERS}",
            "grpo.val_stop_metric=validation/easy/pass@4",
            "grpo.val_stop_threshold=0.01",
            "policy.train_global_batch_size=32",
            "policy.data_parallel_size=1",
            "policy.scheduler.decay_style=constant",
            "generation.num_engines=1",
            "rollout.dump_period=1",
            "loss_fn.use_generation_logprobs_as_prev=true",
            "checkpointing.export_final_hf=false",
        ],
    )


def test_the_run_stops_when_a_validation_reaches_its_goal(run: FinishedRun) -> None:
    assert run.returncode == 0, run.output
    (record,) = run.records()
    assert record["validation/easy/pass@4"] >= 0.01
    assert "stopped after step 1: grpo.val_stop_threshold is reached" in run.output


def test_the_ratio_is_to_what_the_engine_sampled_with(run: FinishedRun) -> None:
    (record,) = run.records()
    assert 1 <= record["train/token_mult_prob_error"] < 1.001
    assert record["train/probs_ratio"] == pytest.approx(1, abs=1e-4)  # one update
    assert "data_plane/write/prev_logprobs/bytes" not in record


def test_every_set_has_metrics_of_its_own_beside_those_of_all(run: FinishedRun) -> None:
    (record,) = run.records()
    sizes = [record[f"validation/{name}num_samples"] for name in ("easy/", "file/", "")]
    assert sizes == [NUM_PROBLEMS * NUM_ANSWERS, NUM_PROBLEMS * NUM_ANSWERS, 2 * NUM_PROBLEMS * NUM_ANSWERS]
    for key in ("accuracy", "pass@1", "pass@2", "pass@4", "mean@4", "majority@4"):
        parts = [record[f"validation/{name}/{key}"] for name in ("easy", "file")]
        assert record[f"validation/{key}"] == pytest.approx(sum(parts) / 2)
    assert record["validation/pass@1"] == pytest.approx(record["validation/mean@4"])
    assert record["validation/pass@1"] < record["validation/pass@4"]


def test_training_prompts_are_mixed_by_weight_and_too_long_ones_are_left_out(run: FinishedRun) -> None:
    lines = (run.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    assert len(prompts) == 32
    assert sum(prompt.endswith("1+21=") for prompt in prompts) == 8
    assert max(map(len, prompts)) == 6
    assert "data.train file: 30 problems, 10 too long" in run.output


def test_validation_answers_are_in_the_files_of_wandb(run: FinishedRun) -> None:
    tables = list((run.run_dir / "wandb").glob("offline-run-*/files/media/table/validation/answers*.json"))
    assert len(tables) == 1
    assert len(json.loads(tables[0].read_text())["data"]) == 4
