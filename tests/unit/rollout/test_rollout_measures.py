"""What is measured of a rollout's conversations and requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from nemo_like.data.interface import Encoded
from nemo_like.environments.interface import Failure, FailureKind, Feedback
from nemo_like.generation.interface import Response
from nemo_like.rollout.conversation import Conversation, Passage
from nemo_like.rollout.rollout_measures import measure_rollout
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.rollout_checks import rollout_alarms
from tests.unit.rollout.conversations import conversation, finished, response

STOP = {"sums": (1, 2)}
DONE = Feedback({"r": 1.0})


@dataclass
class Held:
    groups: Sequence[Sequence[Conversation]]
    seeds: list[int] = field(default_factory=lambda: [3, 4, 5])
    weights_digests: set[int | None] = field(default_factory=lambda: {17})
    num_misplaced_answers: int = 0


def measured(*responses: Response, **changes: object) -> dict[str, float]:
    group = [finished((4, 5), one, DONE) for one in responses]
    found = measure_rollout(Held([group], **changes), STOP)  # type: ignore[arg-type]
    return {name: metric.value for name, metric in found.items()}


def test_seeds_and_answers_are_counted() -> None:
    found = measured(response([7, 1]), seeds=[3, 4, 3, 3], num_misplaced_answers=2)
    assert found[Measured.num_seeds] == 4
    assert found[Measured.num_repeated_seeds] == 2
    assert found[Measured.num_misplaced_answers] == 2


def test_a_response_ends_with_a_stop_token_or_is_truncated() -> None:
    ended, truncated, neither = response([7, 1]), response([7, 8], is_truncated=True), response([7, 8])
    by_another = response([8, 2])
    assert measured(ended, truncated, by_another)[Measured.num_unended_responses] == 0
    assert measured(ended, truncated, by_another, neither)[Measured.num_unended_responses] == 1


def test_with_stop_strings_a_response_may_end_anywhere() -> None:
    group = [finished((4, 5), response([7, 8]), DONE)]
    assert measure_rollout(Held([group]), {})[Measured.num_unended_responses].value == 0


def test_only_the_last_response_of_a_conversation_may_be_truncated() -> None:
    sample = conversation(max_turns=2)
    sample.add_response(response([7, 8]), "x", 3)
    sample.add_feedback(Feedback(observation="go on", is_done=False))
    sample.add_observation("go on", Encoded((9,)))
    sample.add_response(response([7, 8], is_truncated=True), "x", 3)
    sample.add_feedback(DONE)
    assert measure_rollout(Held([[sample]]), STOP)[Measured.num_unended_responses].value == 1


def test_logprobs_above_0_or_not_finite_are_impossible() -> None:
    found = measured(response([7, 8, 1], [-0.5, math.nan, 0.1]), response([1], [-math.inf]))
    assert found[Measured.num_impossible_logprobs] == 3
    assert measured(response([7, 1], [1e-6, 0.0]))[Measured.num_impossible_logprobs] == 0


def test_neighbours_are_equal_with_the_probability_of_the_first() -> None:
    half = math.log(0.5)
    same, other = response([7, 1], [half, half]), response([8, 1], [half, 0.0])
    found = measured(same, same, other, same, other)
    assert found[Measured.num_equal_neighbours] == 1  # of the pairs (same, same) and (other, same)
    assert found[Measured.expected_equal_neighbours] == pytest.approx(0.25 + 0.5)


def test_the_digests_of_the_weights_that_sampled_are_kept() -> None:
    found = measured(response([1]), weights_digests={17, 2**46})
    assert (found[Measured.engine_digest_min], found[Measured.engine_digest_max]) == (17, 2**46)
    assert Measured.engine_digest_min not in measured(response([1]), weights_digests={None})


def unread(generation: int) -> Conversation:
    """A sample whose prompt has an image that cannot be read."""
    sample = conversation(generation=generation)
    sample.fail(Failure(FailureKind.bad_image, "gone.png cannot be read"), 3)
    return sample


def forced(generation: int) -> Conversation:
    """An agent's session in which a grammar forced every token, so that none trains."""
    sample = conversation(generation=generation)
    sample.passages.append(Passage(np.array([9], np.int32), None))
    sample.num_turns = 1
    sample.add_feedback(DONE)
    return sample


@pytest.mark.parametrize("without_response", [unread, forced])
def test_samples_without_a_response_are_left_out(without_response: Callable[[int], Conversation]) -> None:
    half = math.log(0.5)
    failed = [without_response(0), without_response(1)]
    truncated = finished((4, 5), response([7, 8], is_truncated=True), DONE)
    pair = [finished((4, 5), response([token, 1], [half, half]), DONE) for token in (7, 8)]
    # These samples come first, between others, and last.
    found = measure_rollout(Held([failed, [truncated], failed, pair, failed]), STOP)
    assert found[Measured.num_unended_responses].value == 0
    assert found[Measured.num_equal_neighbours].value == 0
    assert found[Measured.expected_equal_neighbours].value == pytest.approx(0.25)


@pytest.mark.parametrize("without_response", [unread, forced])
def test_a_rollout_in_which_nothing_was_sampled_has_nothing_wrong(
    without_response: Callable[[int], Conversation],
) -> None:
    group = [without_response(0), without_response(1)]
    found = measure_rollout(Held([group], seeds=[], weights_digests=set()), STOP)
    assert {name: metric.value for name, metric in found.items()} == dict.fromkeys(found, 0.0)
    assert not [*rollout_alarms({name: metric.value for name, metric in found.items()})]
