"""Whole runs that end with their epochs, and continue with more of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from tests.functional.runs import FEWEST_PROCESSES, run_grpo

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_run]

AHEAD = (
    "grpo.max_staleness=1",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
)
CRITIC = ("value=default", "grpo.adv_estimator.name=gae", "grpo.skip_idle_samples=false")


def arguments(directory: Path, of_case: tuple[str, ...]) -> list[str]:
    """The arguments of a run on ten problems, which lie in this directory."""
    records = [{"prompt": f"0{number}+11=", "answer": f"{number + 11}0"} for number in range(10)]
    data = directory / "train.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    return [
        f"data.train=[{{kind: jsonl, path: '{data}', env: arithmetic}}]",
        *("grpo.num_prompts_per_step=4", "grpo.num_generations_per_prompt=2"),
        *("policy.train_global_batch_size=8", "policy.scheduler.warmup_updates=0"),
        *("policy.scheduler.decay_updates=${updates_of_run:policy}", "grpo.val_period=0"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.metric_name=null"),
        *("checkpointing.enabled=true", "checkpointing.save_period=100"),
        *FEWEST_PROCESSES,
        *of_case,
    ]


def test_a_run_that_ended_with_its_epochs_has_finished(tmp_path: Path) -> None:
    two = [*arguments(tmp_path, AHEAD), "grpo.max_num_epochs=2"]
    run = run_grpo(tmp_path, two)
    assert run.returncode == 0, run.output
    assert "grpo.max_num_epochs=2: 5 steps, which begin with 4 prompts of 10 each" in run.output
    # Twenty prompts: the third step has the last two of the first epoch, and two of the second.
    assert run.metrics("step") == [1, 2, 3, 4, 5]
    written = yaml.safe_load((run.run_dir / "config.yaml").read_text())
    assert (written["grpo"]["max_num_steps"], written["policy"]["scheduler"]["decay_updates"]) == (5, 5)
    again = run_grpo(tmp_path, two, name=run.mark)
    assert "had finished already; raise grpo.max_num_epochs, its steps or its goal" in again.output


@pytest.mark.slow
@pytest.mark.parametrize("of_case", [AHEAD, CRITIC], ids=["rollouts that run ahead", "a critic"])
def test_a_run_ends_with_its_epochs_and_goes_on_with_more(tmp_path: Path, of_case: tuple[str, ...]) -> None:
    given = arguments(tmp_path, of_case)
    first = run_grpo(tmp_path, [*given, "grpo.max_num_epochs=1"])
    assert first.returncode == 0, first.output
    assert first.metrics("step") == [1, 2]
    more = run_grpo(tmp_path, [*given, "grpo.max_num_epochs=2"], name=first.mark)
    assert more.returncode == 0, more.output
    assert more.metrics("step") == [1, 2, 3, 4, 5]
