from __future__ import annotations

import asyncio

import numpy as np
import pytest

from nemo_like.environments.interface import Feedback
from nemo_like.generation.interface import GroupResult, Response
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.sync_rollout import _ActiveRollout


def _active() -> _ActiveRollout:
    """Two prompts, to be sampled by policy version 5."""
    return _ActiveRollout(
        prompts=PromptBatch(
            mode=RolloutMode.training, step=6, policy_version=5, indices=(0, 1), num_generations=1
        ),
        examples=[],
        prompt_ids=[],
        finished=asyncio.get_running_loop().create_future(),
        started_s=0.0,
    )


async def _rewarded(active: _ActiveRollout, error: Exception | None = None) -> None:
    """A reward task that ends, with its callback run."""

    async def reward() -> None:
        if error is not None:
            raise error

    task = asyncio.get_running_loop().create_task(reward())
    task.add_done_callback(active.on_rewarded)
    await asyncio.wait([task])
    await asyncio.sleep(0)


def test_the_last_reward_resolves_the_rollout_and_no_earlier_one() -> None:
    async def scenario() -> tuple[bool, bool]:
        active = _active()
        active.feedback[1] = [Feedback(rewards={"exact_match": 1.0})]
        await _rewarded(active)
        after_first = active.finished.done()
        active.feedback[0] = [Feedback(rewards={"exact_match": 0.0})]
        await _rewarded(active)
        return after_first, active.finished.done()

    assert asyncio.run(scenario()) == (False, True)


def test_a_reward_that_raises_fails_the_rollout_with_its_error() -> None:
    async def scenario() -> None:
        active = _active()
        await _rewarded(active, KeyError("no such environment"))
        await _rewarded(active, ValueError("a later one"))
        await active.finished

    with pytest.raises(KeyError, match="no such environment"):
        asyncio.run(scenario())


def test_a_group_of_other_weights_fails_the_rollout() -> None:
    async def scenario() -> None:
        active = _active()
        response = Response(np.array([1], np.int32), np.array([-0.5], np.float32), is_truncated=False)
        active.check_version(GroupResult("training/6/0", (response,), policy_version=4))
        await active.finished

    with pytest.raises(RuntimeError, match="sampled by policy version 4, not by 5"):
        asyncio.run(scenario())
