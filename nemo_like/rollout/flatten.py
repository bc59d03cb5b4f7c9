"""Turns finished conversations into packed columns and tags. Pure: nothing here waits or calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise, repeat, takewhile
from typing import Any

import numpy as np

from nemo_like.batch.columns import GENERATION_LOGPROBS, INPUT_IDS, RESPONSE_MASK, Column, Layout
from nemo_like.batch.tags import (
    GROUP_ID,
    IS_JUDGED,
    IS_TRUNCATED,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    NUM_TURNS,
    POLICY_VERSION,
    REWARD,
    TagValue,
    by_tag_name,
)
from nemo_like.data_plane.interface import ColumnData
from nemo_like.environments.column_values import column_value, nothing
from nemo_like.rollout.conversation import Conversation, Passage


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """The arguments of ``DataPlane.put``: N = sum of chunk_sizes samples, ordered by (prompt, generation)."""

    columns: dict[str, ColumnData]
    lengths: list[int]  # tokens per sample: prompt, responses and observations
    chunk_sizes: list[int]  # one chunk per group
    tags: dict[str, Sequence[TagValue]]


def flatten(
    groups: Sequence[Sequence[Conversation]], columns: Sequence[Column] = (), *, first_group: int = 0
) -> FlatBatch:
    """Lay out every sample's tokens one after the other; ``groups`` has the conversations of some of a
    rollout's prompts.

    The group of the rollout's first prompt has the number ``first_group``. ``columns`` are the columns that
    passages bring besides the log-probs; a passage without a value gets ``nothing``.

    Columns: input_ids int32; response_mask uint8, 1 on tokens that the policy chose; generation_logprobs
    float32, nats, 0 elsewhere. Tags: group_id, is_judged (false where the environment failed), reward (0
    there), num_prompt_tokens (that a group has in common), num_response_tokens (generated ones), num_turns,
    is_truncated, policy_version.
    Raises ColumnMismatch for a value that does not fit its column.
    """
    samples = list(chain.from_iterable(groups))
    rows: list[list[Passage]] = []  # per sample
    for group in groups:
        prompt, ids = group[0].prompt_passage, group[0].prompt_ids
        rows += [
            # Agents begin as they please; the samples of other groups have one prompt.
            [
                sample.own_prompt(prompt if sample.prompt_ids is ids else sample.prompt_passage),
                *sample.passages,
            ]
            for sample in group
        ]
    passages = list(chain.from_iterable(rows))
    lengths = [len(passage.token_ids) for passage in passages]
    mask = np.concatenate([passage.trains for passage in passages])
    zeros = np.zeros(max(lengths), dtype=np.float32)
    return FlatBatch(
        columns={
            INPUT_IDS.name: np.concatenate([passage.token_ids for passage in passages]),
            RESPONSE_MASK.name: mask,
            GENERATION_LOGPROBS.name: np.concatenate(
                [
                    zeros[:length] if passage.logprobs is None else passage.trains * passage.logprobs
                    for passage, length in zip(passages, lengths, strict=True)
                ]
            ),
            **{column.name: _column_of_groups(column, rows, groups) for column in columns},
        },
        lengths=[sample.num_tokens for sample in samples],
        chunk_sizes=[len(group) for group in groups],
        tags=by_tag_name(
            {
                GROUP_ID: [first_group + sample.position for sample in samples],
                REWARD: [sample.reward or 0.0 for sample in samples],
                IS_JUDGED: [sample.failure is None for sample in samples],
                NUM_PROMPT_TOKENS: [
                    count for group in groups for count in repeat(_num_common(group), len(group))
                ],
                NUM_RESPONSE_TOKENS: [sample.num_response_tokens for sample in samples],
                NUM_TURNS: [sample.num_turns for sample in samples],
                IS_TRUNCATED: [sample.is_truncated for sample in samples],
                POLICY_VERSION: [sample.policy_version for sample in samples],
            }
        ),
    )


def _num_common(group: Sequence[Conversation]) -> int:
    """Return with how many tokens the prompts of all samples begin; those of agents may differ."""
    distinct = list({id(one.prompt_ids): one.prompt_ids for one in group}.values())
    if len(distinct) == 1:
        return len(distinct[0])
    return sum(1 for _ in takewhile(lambda ids: len(set(ids)) == 1, zip(*distinct, strict=False)))


def sample_value(column: Column, passages: Sequence[Passage]) -> Any:
    """Return a sample's value of a column, from its passages; the first passage is the prompt.

    A column per token joins the values of all passages; any other column has the latest value. ``nothing``
    stands where no passage has a value. Raises ColumnMismatch for a value that does not fit.
    """
    if column.layout is Layout.per_token:
        return np.concatenate([_passage_value(column, passage) for passage in passages])
    given = (passage for passage in reversed(passages) if column.name in passage.columns)
    return _passage_value(column, next(given, passages[0]))


def _passage_value(column: Column, passage: Passage) -> Any:
    num_tokens = len(passage.token_ids)
    if column.name not in passage.columns:
        return nothing(column, num_tokens)
    return column_value(column, passage.columns[column.name], num_tokens)


def _first_that_has(column: Column, samples: Sequence[Sequence[Passage]]) -> Sequence[Passage]:
    """Return the passages of the first sample that has a value of the column, or of the first sample when
    none has."""
    having = (one for one in samples if any(column.name in passage.columns for passage in one))
    return next(having, samples[0])


def _column_of_groups(
    column: Column, rows: Sequence[Sequence[Passage]], groups: Sequence[Sequence[Conversation]]
) -> ColumnData:
    """Return a column's values for all groups. A column per prompt takes the value of the first sample of
    each group that has one."""
    if column.per_prompt:
        ends = list(accumulate(map(len, groups), initial=0))
        of_groups = [rows[start:stop] for start, stop in pairwise(ends)]
        values = [sample_value(column, _first_that_has(column, samples)) for samples in of_groups]
    else:
        values = [sample_value(column, passages) for passages in rows]
    if not column.is_dense:
        return values
    return np.concatenate(values) if column.layout is Layout.per_token else np.stack(values)
