"""Measures a training rollout for the tripwires, from conversations and requests rather than from columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from nemo_like.observability.metrics import Metric, maximum, minimum, summed
from nemo_like.rollout.conversation import Conversation, Passage
from nemo_like.tripwires.measured import Measured

# An engine's log-probs may be above 0 by rounding.
_ROUNDING_NATS = 1e-3


class HeldRollout(Protocol):
    """A rollout that has ended; ``TurnLoop`` is one."""

    groups: Sequence[Sequence[Conversation]]
    seeds: list[int]
    weights_digests: set[int | None]
    num_misplaced_answers: int


def measured_rollout(rollout: HeldRollout, stop_tokens: Mapping[str, int]) -> dict[str, Metric]:
    """Measure what ``tripwires.rollout_checks`` judges.

    ``stop_tokens`` gives, by environment, the token that ends every response that is not truncated.
    """
    samples = [sample for group in rollout.groups for sample in group]
    responses = [_responses(sample) for sample in samples]
    logprobs = [passage.logprobs for each in responses for passage in each if passage.logprobs is not None]
    joined = np.concatenate(logprobs)
    is_possible = np.isfinite(joined) & (joined <= _ROUNDING_NATS)
    num_unended = sum(
        map(_num_unended, samples, responses, [stop_tokens.get(s.example.env) for s in samples])
    )
    num_equal, num_expected = _equal_neighbours(rollout.groups)
    digests = [digest for digest in rollout.weights_digests if digest is not None]
    return {
        Measured.num_seeds: summed(len(rollout.seeds)),
        Measured.num_repeated_seeds: summed(len(rollout.seeds) - len(set(rollout.seeds))),
        Measured.num_unended_responses: summed(num_unended),
        Measured.num_misplaced_answers: summed(rollout.num_misplaced_answers),
        Measured.num_impossible_logprobs: summed(len(joined) - int(is_possible.sum())),
        Measured.num_equal_neighbours: summed(num_equal),
        Measured.expected_equal_neighbours: summed(num_expected),
        **({Measured.engine_digest_min: minimum(min(digests))} if digests else {}),
        **({Measured.engine_digest_max: maximum(max(digests))} if digests else {}),
    }


def _responses(sample: Conversation) -> list[Passage]:
    return [passage for passage in sample.passages if passage.logprobs is not None]


def _num_unended(sample: Conversation, responses: Sequence[Passage], stop_token: int | None) -> int:
    """Count the responses without the stop token at their end; the last one may be truncated instead."""
    if stop_token is None:
        return 0
    ended = responses[:-1] if sample.latest_is_truncated else responses
    return sum(passage.token_ids[-1] != stop_token for passage in ended)


def _equal_neighbours(groups: Sequence[Sequence[Conversation]]) -> tuple[int, float]:
    """Count pairs of neighbours (samples 0 and 1, 2 and 3, ...) with the same first response; return also
    the number that their log-probs let expect: the second equals the first with the first's probability."""
    pairs = [group[i : i + 2] for group in groups for i in range(0, len(group) - 1, 2)]
    firsts = [(one.passages[0], other.passages[0]) for one, other in pairs]
    if not firsts:
        return 0, 0.0
    num_equal = sum(one.token_ids.tobytes() == other.token_ids.tobytes() for one, other in firsts)
    lengths = np.array([len(one.token_ids) for one, _ in firsts], dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    joined = np.concatenate([one.logprobs for one, _ in firsts if one.logprobs is not None])
    return num_equal, float(np.exp(np.minimum(np.add.reduceat(joined, starts), 0.0)).sum())
