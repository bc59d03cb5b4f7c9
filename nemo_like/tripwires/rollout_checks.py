"""Judges the numbers that the rollout actor measured of a step's samples. Standard library only."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping

from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# Equal responses are an alarm where chance gives at least as many with a probability below e^-40.
_LEAST_LOG_CHANCE = -40.0
_NUM_STEPS = 16  # whose equal responses are added up

_COUNTS = {
    Measured.num_repeated_seeds: (
        "seeds",
        "{count:g} of {of:g} responses were sampled with a seed that another response of the step had, so "
        "they are not independent",
        "how requests get their seeds (rollout/prompts.py, rollout/turn_loop.py)",
    ),
    Measured.num_unended_responses: (
        "response_ends",
        "{count:g} responses neither end with a stop token nor count as truncated",
        "generation.stop_strings and stop_token_ids, and how the engine reports why a response ended "
        "(generation/vllm_engine.py)",
    ),
    Measured.num_misplaced_answers: (
        "rewards",
        "{count:g} samples got the environment's answer to another sample's response",
        "the order of answers (environments/pool.py, and your environment's step)",
    ),
    Measured.num_impossible_logprobs: (
        "finite",
        "{count:g} log-probs of the engine are not finite, or above 0",
        "the engine's precision and logs; weights that are not finite give such log-probs too",
    ),
}


def rollout_alarms(measured: Mapping[str, float]) -> Iterator[Alarm]:
    """Yield an alarm for every count that must be 0 and is not, and an alarm when responses are equal too
    often.

    A number that was not measured is not judged.
    """
    for name, (tripwire, wrong, look_at) in _COUNTS.items():
        if count := measured.get(name, 0.0):
            of = measured.get(Measured.num_seeds, 0.0)
            yield Alarm(tripwire=tripwire, wrong=wrong.format(count=count, of=of), look_at=look_at)
    count = measured.get(Measured.num_equal_neighbours, 0.0)
    yield from _equal_responses(count, measured.get(Measured.expected_equal_neighbours, 0.0), "")


class EqualResponses:
    """Adds the equal responses of the latest steps up: what one step may have by chance, several have not."""

    def __init__(self) -> None:
        self._latest: deque[tuple[float, float]] = deque(maxlen=_NUM_STEPS)

    def alarms(self, measured: Mapping[str, float]) -> Iterator[Alarm]:
        """Yield an alarm when the latest steps have more equal responses than their probabilities allow."""
        count = measured.get(Measured.num_equal_neighbours, 0.0)
        of_step = count, measured.get(Measured.expected_equal_neighbours, 0.0)
        self._latest.append(of_step)
        num_steps = len(self._latest)
        if num_steps > 1 and log_chance(*of_step) >= _LEAST_LOG_CHANCE:  # else the step alone is an alarm
            counts, expected = zip(*self._latest, strict=True)
            yield from _equal_responses(sum(counts), sum(expected), f" in the latest {num_steps} steps")


def judged_alarms(num_unjudged: int, num_failed: int) -> Iterator[Alarm]:
    """Yield an alarm unless the number of samples marked as not judged equals the number without a reward."""
    if num_unjudged != num_failed:
        yield Alarm(
            tripwire="masks",
            wrong=f"{num_unjudged} samples count as not judged, but {num_failed} have no reward",
            look_at="is_judged (rollout/flatten.py); a reward of 0 is a reward",
        )


def log_chance(count: float, expected: float) -> float:
    """Return an upper bound on the natural logarithm of the chance of ``count`` or more independent events,
    when on average ``expected`` of them happen.

    This is Chernoff's bound: e^(-expected) (e expected / count)^count; 0 where ``count`` is not above
    ``expected``.
    """
    if count <= expected:
        return 0.0
    if expected <= 0.0:
        return -math.inf
    return count - expected + count * math.log(expected / count)


def _equal_responses(count: float, expected: float, when: str) -> Iterator[Alarm]:
    if log_chance(count, expected) < _LEAST_LOG_CHANCE:
        yield Alarm(
            tripwire="constant_generation",
            wrong=(
                f"{count:g} pairs of samples of one prompt have the same response{when}, where their "
                f"probabilities give {expected:.3g}"
            ),
            look_at="seeds, temperature and log-probs of the engine (generation/vllm_engine.py)",
        )
