"""The tokens of a sample in a dump: their texts, and the numbers that engine and trainer gave them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from nemo_like.batch.columns import (
    ENTROPIES,
    GENERATION_LOGPROBS,
    PARENT_GAPS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    TEACHER_LOGPROBS,
    TOKEN_ADVANTAGES,
    VALUES,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import ADVANTAGE, SAMPLE_MASK, TOKEN_SCALE
from nemo_like.data_plane.interface import DataPlane
from nemo_like.rollout.conversation import Conversation

TokenTexts = Callable[[Sequence[int]], list[str]]
# One number per token by column name, [T] of one sample.
Scores = Mapping[str, np.ndarray]

_SCORES = tuple(
    column.name
    for column in (
        PREV_LOGPROBS,
        ENTROPIES,
        REFERENCE_LOGPROBS,
        TEACHER_LOGPROBS,
        VALUES,
        TOKEN_ADVANTAGES,
    )
)
_ADVANTAGES = "advantages"  # of tokens, with a critic
_NUM_DIGITS = 5


def fetch_scores(plane: DataPlane, ledger: Sequence[KVBatchMeta]) -> dict[str, Scores]:
    """Fetch the trainer's numbers for the tokens of these samples, by sample id.

    Samples that were dropped before they were scored have none. The partition must be open where a batch has
    such columns.
    """
    found: dict[str, Scores] = {}
    for batch in ledger:
        names = [name for name in _SCORES if name in batch.columns]
        if names:
            packed = plane.fetch(batch, names)
            bounds = list(accumulate(batch.lengths, initial=0))
            for sample_id, (start, stop) in zip(batch.sample_ids, pairwise(bounds), strict=True):
                found[sample_id] = {name: np.asarray(packed[name])[start:stop] for name in names}
            plane.forget(batch.partition)
    return found


def dumped_tokens(
    sample: Conversation, tags: Mapping[str, Any], scores: Scores, texts: TokenTexts
) -> dict[str, list[Any]]:
    """Return lists over the tokens after the prompt: ``text``, and one list for each kind of number; where
    tokens of an agent's session do not follow the token before them also ``parent_gaps``.

    A number is null on tokens that the policy did not generate. With a critic, ``advantages`` are the values
    that the loss uses, the sample's advantage plus the token's own, but for penalties of responses of a wrong
    form; 0 in a masked sample.
    """
    if not sample.passages:
        return {}
    ids = np.concatenate([passage.token_ids for passage in sample.passages]).tolist()
    sampled = [passage.logprobs is not None for passage in sample.passages for _ in passage.token_ids]
    numbers = {
        GENERATION_LOGPROBS.name: np.concatenate(
            [
                np.zeros(len(passage.token_ids)) if passage.logprobs is None else passage.logprobs
                for passage in sample.passages
            ]
        ),
        **{name: values[-len(ids) :] for name, values in scores.items() if name != TOKEN_ADVANTAGES.name},
    }
    if TOKEN_ADVANTAGES.name in scores and TOKEN_SCALE.name in tags and tags.get(ADVANTAGE.name) is not None:
        own = scores[TOKEN_ADVANTAGES.name][-len(ids) :]
        trains = bool(tags[SAMPLE_MASK.name])
        numbers[_ADVANTAGES] = trains * (tags[ADVANTAGE.name] + tags[TOKEN_SCALE.name] * own)
    gaps = [
        gap
        for passage in sample.passages
        for gap in passage.columns.get(PARENT_GAPS.name, np.zeros(len(passage.token_ids), int)).tolist()
    ]
    return {
        "text": texts(ids),
        **{name: _listed(values, sampled) for name, values in numbers.items()},
        **({PARENT_GAPS.name: gaps} if any(gaps) else {}),
    }


def _listed(values: np.ndarray, sampled: Sequence[bool]) -> list[float | None]:
    return [
        round(value, _NUM_DIGITS) if is_sampled and np.isfinite(value) else None
        for value, is_sampled in zip(np.asarray(values, np.float64).tolist(), sampled, strict=True)
    ]
