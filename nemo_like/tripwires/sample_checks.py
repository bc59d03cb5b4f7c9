"""Counts the samples whose columns do not fit their tags, in the process that holds the columns. Uses
numpy."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_DIGEST_SHIFT = 33  # 31 bits are left, which a small tag can carry


def sample_digests(input_ids: np.ndarray, lengths: Sequence[int] | np.ndarray) -> list[int]:
    """Return for each sample a number below 2^31 that changes when a token changes or tokens change places.

    ``input_ids`` is packed, [sum of lengths] of any integer type.
    """
    starts, positions = _starts_and_positions(lengths)
    products = (input_ids.astype(np.uint64) + np.uint64(1)) * _multipliers(int(max(lengths)))[positions]
    return (np.add.reduceat(products, starts) >> np.uint64(_DIGEST_SHIFT)).astype(np.int64).tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleTags:
    """The rollout actor's tags of N samples, one entry per sample; ``digests`` is None where it made none."""

    lengths: Sequence[int]
    num_prompt_tokens: Sequence[int]
    num_response_tokens: Sequence[int]
    digests: Sequence[int] | None = None
    are_sessions: bool = (
        False  # of agents: in the mask tokens may be missing anywhere, as at a branch's start
    )


def num_wrong_samples(
    tags: SampleTags,
    input_ids: np.ndarray,
    response_mask: np.ndarray,
    generation_logprobs: np.ndarray | None = None,
) -> int:
    """Return how many samples have columns that do not fit their tags. Columns are packed.

    A sample is wrong when its tokens do not have its digest; when its mask covers a prompt token, has another
    number of ones than there are response tokens, or leaves out the first token after the prompt or the last
    token (agents' sessions may leave these out); or when a token outside the mask has a log-prob, which only
    sampled tokens have.
    """
    lengths = np.asarray(tags.lengths)
    starts, positions = _starts_and_positions(tags.lengths)
    mask = response_mask.astype(bool)
    num_prompt = np.asarray(tags.num_prompt_tokens)
    num_response = np.asarray(tags.num_response_tokens)
    in_prompt = positions < np.repeat(num_prompt, lengths)
    is_odd = mask & in_prompt
    if generation_logprobs is not None:
        is_odd |= ~mask & (generation_logprobs != 0)
    has_response = (num_response > 0) & (num_prompt < lengths)
    is_wrong = np.add.reduceat(is_odd, starts, dtype=np.int64) > 0
    is_wrong |= np.add.reduceat(mask, starts, dtype=np.int64) != num_response
    if not tags.are_sessions:
        is_wrong |= has_response & ~mask[starts + np.minimum(num_prompt, lengths - 1)]
        is_wrong |= has_response & ~mask[starts + lengths - 1]
    if tags.digests is not None:
        is_wrong |= np.asarray(sample_digests(input_ids, tags.lengths)) != np.asarray(tags.digests)
    return int(is_wrong.sum())


def _starts_and_positions(lengths: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return where each sample starts, and each token's position in its sample."""
    ends = np.cumsum(lengths)
    starts = ends - np.asarray(lengths)
    return starts, np.arange(ends[-1]) - np.repeat(starts, lengths)


@functools.lru_cache(maxsize=4)
def _multipliers(count: int) -> np.ndarray:
    """Return ``count`` random odd numbers, always the same."""
    return np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, count, np.uint64) | np.uint64(1)
