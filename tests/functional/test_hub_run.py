"""A short run whose problems and rewards are those of a hub's environment."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.functional.hub_fixtures import PYTHON
from tests.functional.runs import FinishedRun
from tests.functional.test_tasks import SMALL, run_task
from tests.lacking import HUBS

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.whole_run,
    pytest.mark.skipif(not Path(PYTHON).exists(), reason=HUBS),
]

LAKE = {
    "env_id": "FrozenLake-v1",
    "arguments": {"is_slippery": False},
    "action_pattern": "([0-3])",
    "invalid_reward": -0.5,
    "prompt_template": "{observation}=",
    "observation_template": " {observation}=",
}


@pytest.fixture(scope="module")
def run(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two steps of a walk over a frozen lake, whose places are numbers; problems are made by the package."""
    made = {"kind": "environment", "env": "task"}
    settings = {
        **SMALL,
        "grpo": {**SMALL["grpo"], "max_num_steps": 2, "val_at_end": True, "max_val_samples": 8},
        "policy": {**SMALL["policy"], "max_total_sequence_length": 64},
        "data": {
            "train": {**made, "options": {"size": 64}},
            "validation": {**made, "options": {"size": 8}},
        },
        "env": {"task": {"max_turns": 4, "num_actors": 2, "options": LAKE}},
        "rollout": {"dump_period": 1},
    }
    return run_task(tmp_path_factory.mktemp("lake"), "gymnasium", settings)


def test_two_steps_train_on_episodes_of_a_gymnasium_game(run: FinishedRun) -> None:
    assert run.returncode == 0, run.output
    for record in run.records()[:2]:
        assert record["train/avg_turns_per_sample"] > 1.5
        assert 0.0 < record["train/env/task/valid_action"] <= 1.0
        assert record["train/num_failed_rewards"] == 0
        assert record["train/token_mult_prob_error"] < 1.001
    assert run.records()[-1]["validation/num_samples"] == 8


def test_every_episode_is_of_its_own_seed_and_has_its_turns(run: FinishedRun) -> None:
    lines = (run.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]
    assert len(samples) == 32 * 8
    assert {sample["prompt"] for sample in samples} == {"0="}
    for sample in samples:
        said = [turn["content"] for turn in sample["turns"] if turn["role"] == "environment"]
        assert all(text.startswith(" ") and text.endswith("=") for text in said)
