"""A short run whose problems and rewards are those of a hub's environment."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

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
STOP = "2"  # ends a turn, as an answer's end does
# A turn of the demo has at most four tokens. The overlong penalty grows over the last ones of all turns.
MAX_TURNS, BUFFER = 4, 4
MAX_TOKENS = MAX_TURNS * 4


@pytest.fixture(scope="module")
def run(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two steps of a walk over a frozen lake, whose places are numbers; problems are made by the package."""
    made = {"kind": "environment", "env": "task"}
    grpo = {
        **SMALL["grpo"],
        **{"max_num_steps": 2, "val_at_end": True, "max_val_samples": 8},
        "reward_shaping": {"enabled": True, "overlong_buffer_length": BUFFER},
    }
    task = {"max_turns": MAX_TURNS, "num_actors": 2, "options": LAKE, "sampling": {"stop_strings": [STOP]}}
    settings = {
        **SMALL,
        "grpo": grpo,
        "policy": {**SMALL["policy"], "max_total_sequence_length": 64},
        "data": {
            "train": {**made, "options": {"size": 64}},
            "validation": {**made, "options": {"size": 8}},
        },
        "env": {"task": task},
        "rollout": {"dump_period": 1},
    }
    return run_task(tmp_path_factory.mktemp("lake"), "gymnasium", settings)


def samples_of(run: FinishedRun, step: int) -> list[dict[str, Any]]:
    """What the dump says of a step's samples."""
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_two_steps_train_on_episodes_of_a_gymnasium_game(run: FinishedRun) -> None:
    assert run.returncode == 0, run.output
    for record in run.records()[:2]:
        assert record["train/avg_turns_per_sample"] > 1.5
        assert 0.0 < record["train/env/task/valid_action"] <= 1.0
        assert record["train/num_failed_rewards"] == 0
        assert record["train/token_mult_prob_error"] < 1.001
    assert run.records()[-1]["validation/num_samples"] == 8


def test_every_episode_is_of_its_own_seed_and_has_its_turns(run: FinishedRun) -> None:
    samples = samples_of(run, 1)
    assert len(samples) == 32 * 8
    assert {sample["prompt"] for sample in samples} == {"0="}
    for sample in samples:
        said = [turn["content"] for turn in sample["turns"] if turn["role"] == "environment"]
        assert all(text.startswith(" ") and text.endswith("=") for text in said)


def test_a_string_that_ends_a_turn_ends_each_in_which_it_is_said(run: FinishedRun) -> None:
    turns = [turn for sample in samples_of(run, 2) for turn in sample["turns"]]
    # A token such as <unused12>, which may be drawn too, is no text to the engine.
    texts = [re.sub(r"<\w+>", "", turn["content"]) for turn in turns if turn["role"] != "environment"]
    said = [text for text in texts if STOP in text]
    assert len(said) > 50
    assert all(text.index(STOP) == len(text) - 1 for text in said)


def test_a_sample_of_several_turns_is_overlong_by_the_tokens_of_all_its_turns(run: FinishedRun) -> None:
    for step, record in enumerate(run.records()[:2], start=1):
        samples = samples_of(run, step)
        beyond = [max(0, sample["num_response_tokens"] - (MAX_TOKENS - BUFFER)) for sample in samples]
        assert 0 < sum(count > 0 for count in beyond) < len(samples)
        mean_penalty = sum(beyond) / BUFFER / len(samples)
        assert record["train/shaped_reward"] == pytest.approx(record["train/filtered_reward"] - mean_penalty)
