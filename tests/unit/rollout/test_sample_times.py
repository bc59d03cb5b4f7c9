"""The times of a rollout's conversations."""

from __future__ import annotations

import time

from nemo_like.data.interface import Encoded
from nemo_like.environments.interface import Feedback
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.sample_times import times_of
from tests.unit.rollout.conversations import conversation, response


def test_the_session_of_an_agent_has_no_turns() -> None:
    sample = conversation((4, 5))
    sample.add_response(response([6, 7, 8]), "abc", 3)
    sample.add_response(response([1]), "z", 3)
    assert not sample.moments_s  # its calls did not go through the turn loop
    prompts = PromptBatch(RolloutMode.training, 7, 6, (0,), 1)
    ((found,),) = times_of(prompts, [[sample]], time.monotonic()).groups
    assert (found.num_tokens, found.turns) == (6, ())


def test_each_turn_has_its_tokens_and_its_times_since_the_rollout_began() -> None:
    sample = conversation((4, 5), max_turns=2)
    sample.add_response(response([6, 7, 8]), "abc", 3)
    sample.add_feedback(Feedback(observation="go on", is_done=False))
    sample.add_observation("go on", Encoded((9,)))
    sample.add_response(response([1]), "z", 3)
    started_s = time.monotonic() - 10.0
    sample.moments_s = [started_s + after_s for after_s in (0.5, 1.0, 2.0, 2.25, 4.0, 4.5)]
    prompts = PromptBatch(RolloutMode.training, 7, 6, (0,), 1, first_group=3)
    times = times_of(prompts, [[sample]], started_s)
    assert (times.step, times.first_group) == (7, 3)
    assert abs(times.began_s - (time.time() - 10.0)) < 5.0
    ((found,),) = times.groups
    assert found.num_tokens == 7
    assert [
        (turn.num_tokens, *(round(value, 6) for value in (turn.asked_s, turn.came_s, turn.judged_s)))
        for turn in found.turns
    ] == [(3, 0.5, 1.0, 2.0), (1, 2.25, 4.0, 4.5)]
