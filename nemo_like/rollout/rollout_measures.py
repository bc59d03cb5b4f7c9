"""Measures a training rollout for the tripwires, from its conversations and requests instead of its
columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from nemo_like.observability.metrics import Metric, maximum, minimum, summed
from nemo_like.rollout.conversation import Conversation, Passage
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.sample_checks import sample_digests

# An engine's log-probs may be above 0 by rounding.
_ROUNDING_NATS = 1e-3


class EndedRollout(Protocol):
    """A rollout that has ended. ``TurnLoop`` is one."""

    groups: Sequence[Sequence[Conversation]]
    seeds: list[int]
    weights_digests: set[int | None]
    num_misplaced_answers: int


def measure_rollout(rollout: EndedRollout, stop_tokens: Mapping[str, Sequence[int]]) -> dict[str, Metric]:
    """Take the numbers that ``tripwires.rollout_checks`` judges.

    ``stop_tokens`` has, by environment, the tokens that may end a response that is not truncated.
    """
    responses = _Responses(rollout.groups)
    num_equal, num_expected = responses.equal_neighbours()
    digests = [digest for digest in rollout.weights_digests if digest is not None]
    return {
        Measured.num_seeds: summed(len(rollout.seeds)),
        Measured.num_repeated_seeds: summed(len(rollout.seeds) - len(set(rollout.seeds))),
        Measured.num_unended_responses: summed(responses.num_unended(stop_tokens)),
        Measured.num_misplaced_answers: summed(rollout.num_misplaced_answers),
        Measured.num_impossible_logprobs: summed(responses.num_impossible()),
        Measured.num_equal_neighbours: summed(num_equal),
        Measured.expected_equal_neighbours: summed(num_expected),
        **({Measured.engine_digest_min: minimum(min(digests))} if digests else {}),
        **({Measured.engine_digest_max: maximum(max(digests))} if digests else {}),
    }


class _Responses:
    """All responses of a rollout, packed: sample after sample, and within a sample turn by turn.

    Samples without a response are left out: an image of their prompt could not be read, or a grammar forced
    every token of an agent's session.
    """

    def __init__(self, groups: Sequence[Sequence[Conversation]]) -> None:
        groups = [[sample for sample in group if _responses(sample)] for group in groups]
        self._groups = groups
        self._samples = [sample for group in groups for sample in group]
        of_samples = [_responses(sample) for sample in self._samples]
        responses = [passage for each in of_samples for passage in each]
        # An empty array stands for a rollout in which nothing was sampled.
        self._ids = np.concatenate([np.zeros(0, np.int32), *(passage.token_ids for passage in responses)])
        self._logprobs = np.concatenate(
            [np.zeros(0, np.float32), *(passage.logprobs for passage in responses)]
        )
        self._lengths = np.array([len(passage.token_ids) for passage in responses], dtype=np.int64)
        self._ends = np.cumsum(self._lengths)
        # Of each sample: the number of its first response, and that of its last.
        counts = np.array([len(each) for each in of_samples], dtype=np.int64)
        self._last = np.cumsum(counts) - 1
        self._first = self._last - counts + 1

    def num_impossible(self) -> int:
        """Count the log-probs that are not finite or are above 0."""
        is_possible = np.isfinite(self._logprobs) & (self._logprobs <= _ROUNDING_NATS)
        return len(is_possible) - int(is_possible.sum())

    def num_unended(self, stop_tokens: Mapping[str, Sequence[int]]) -> int:
        """Count the responses without a stop token at their end; a sample's last response may be truncated
        instead. Responses of an environment that ``stop_tokens`` lacks are not counted."""
        final = self._ids[self._ends - 1]
        envs = np.array([sample.task_prompt.env for sample in self._samples], dtype=object)
        of_response = np.repeat(envs, self._last - self._first + 1)
        is_ended = np.ones(len(final), bool)
        for env, tokens in stop_tokens.items():
            is_ended &= (of_response != env) | np.isin(final, tokens)
        is_ended[self._last] |= np.array([sample.latest_is_truncated for sample in self._samples], bool)
        return len(is_ended) - int(is_ended.sum())

    def equal_neighbours(self) -> tuple[int, float]:
        """Count pairs of neighbours (samples 0 and 1, 2 and 3, ... of a group) with the same first response.

        Also return the expected number: the second response equals the first with the first one's
        probability.
        """
        starts = np.cumsum([0, *(len(group) for group in self._groups)])[:-1]
        ones = [
            start + place
            for start, group in zip(starts.tolist(), self._groups, strict=True)
            for place in range(0, len(group) - 1, 2)
        ]
        if not ones:
            return 0, 0.0
        digests = np.array(sample_digests(self._ids, self._lengths))
        one, other = self._first[ones], self._first[[place + 1 for place in ones]]
        is_equal = (digests[one] == digests[other]) & (self._lengths[one] == self._lengths[other])
        sums = np.add.reduceat(self._logprobs.astype(np.float64), self._ends - self._lengths)
        return int(is_equal.sum()), float(np.exp(np.minimum(sums[one], 0.0)).sum())


def _responses(sample: Conversation) -> list[Passage]:
    return [passage for passage in sample.passages if passage.logprobs is not None]
