"""Environments with NeMo-RL's interface, as the kind ``custom`` runs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.data.messages import conversation_of
from nemo_like.environments.interface import Exchange
from tests.unit.environments.asking import ask, turn

# As NeMo-RL's guide has such files, with nothing of this framework.
MODULE = '''
import ray
import torch

from nemo_rl.data.interfaces import LLMMessageLogType
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn


@ray.remote
class Guess(EnvironmentInterface[dict]):
    """Guess the number: 1 when it is found, 0.5 less for each guess before."""

    def __init__(self, cfg: dict):
        self.stop = cfg.get("stop")

    def step(
        self, message_log_batch: list[LLMMessageLogType], metadata: list[dict]
    ) -> EnvironmentReturn[dict]:
        said = [log[-1]["content"].strip() for log in message_log_batch]
        found = [one == meta["ground_truth"] for one, meta in zip(said, metadata)]
        counts = [sum(each["role"] == "assistant" for each in log) for log in message_log_batch]
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": f"no. {count}\\n"} for count in counts],
            metadata=[
                {**meta, "guesses": count} if count < 2 else None for meta, count in zip(metadata, counts)
            ],
            next_stop_strings=[self.stop] * len(found),
            rewards=torch.tensor([float(each) for each in found]),
            terminateds=torch.tensor(found),
            answers=None,
        )

    def global_post_process_and_metrics(self, batch: BatchedDataDict) -> tuple[BatchedDataDict, dict]:
        return batch, {}


class TwoRewards(EnvironmentInterface[dict]):
    async def step(self, message_log_batch, metadata):
        ones = torch.ones(len(metadata))
        return EnvironmentReturn(
            [log[0] for log in message_log_batch], metadata, [None] * len(metadata),
            {"right": ones, "short": 0.5 * ones}, ones, None,
        )

    def global_post_process_and_metrics(self, batch):
        return batch, {}
'''


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_nemo_rl.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("of_nemo_rl", None)


def guess(stop: list[str] | None = None) -> dict[str, Any]:
    return {"target": "of_nemo_rl:Guess", "arguments": {"cfg": {"stop": stop}}}


def test_an_actor_class_is_asked_in_process_about_all_turns() -> None:
    asked = [
        turn("7", "7", is_last=False),
        turn("3", "7", prompt=conversation_of([{"role": "user", "content": "?"}])),
    ]
    right, last = ask("custom", *asked, **guess())
    assert right.rewards == {"reward": 1.0} and right.is_done
    assert last.rewards == {"reward": 0.0} and last.is_done  # no turn may follow


def test_metadata_travels_with_the_conversation_and_none_keeps_it() -> None:
    first, *_ = ask("custom", turn("3", "7", is_last=False, data={"level": 2}), **guess())
    assert (first.is_done, first.observation) == (False, "no. 1\n")
    assert first.state.metadata == {"level": 2, "ground_truth": "7", "guesses": 1}
    history = (Exchange("3", "no. 1\n"),)
    second, *_ = ask("custom", turn("4", "7", is_last=False, state=first.state, history=history), **guess())
    assert second.observation == "no. 2\n" and second.state.metadata == first.state.metadata


def test_a_record_may_have_the_metadata_of_its_first_turn() -> None:
    (one,) = ask("custom", turn("5", "7", data={"extra_env_info": {"ground_truth": "5"}}), **guess())
    assert one.rewards == {"reward": 1.0}


def test_named_rewards_are_components() -> None:
    (one,) = ask("custom", turn("5"), target="of_nemo_rl:TwoRewards")
    assert one.rewards == {"right": 1.0, "short": 0.5}


def test_a_response_that_goes_on_after_a_wanted_stop_string_is_an_error() -> None:
    first, *_ = ask("custom", turn("3", "7", is_last=False), **guess(["</a>"]))
    ask("custom", turn("<a>4</a>\n", "7", state=first.state), **guess(["</a>"]))
    with pytest.raises(ValueError, match=r"set generation\.stop_strings=\['</a>'\]"):
        ask("custom", turn("<a>4</a> and more", "7", state=first.state), **guess(["</a>"]))
