"""Finished conversations to packed columns and tags. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.batch.columns import GENERATION_LOGPROBS, INPUT_IDS, RESPONSE_MASK
from nemo_like.batch.tags import (
    GROUP_ID,
    IS_TRUNCATED,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    NUM_TURNS,
    POLICY_VERSION,
    REWARD,
    SAMPLE_MASK,
    TagValue,
    named,
)
from nemo_like.rollout.conversation import Conversation, Segment


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """N = sum of chunk_sizes samples, ordered by (prompt, generation); what ``DataPlane.put`` takes."""

    columns: dict[str, np.ndarray]  # each packed, [sum of lengths]
    lengths: list[int]  # tokens per sample: prompt, responses and observations
    chunk_sizes: list[int]  # one chunk per group
    tags: dict[str, Sequence[TagValue]]


def flatten(groups: Sequence[Sequence[Conversation]], *, first_group: int = 0) -> FlatBatch:
    """Lay out every sample's tokens one after the other; ``groups[i]`` are the samples of prompt i, and
    are numbered from ``first_group``.

    Columns: input_ids int32; response_mask uint8, 1 on what the policy generated; generation_logprobs
    float32, nats, 0 elsewhere. Tags: group_id, reward (0 where the environment failed), sample_mask (0
    there), num_prompt_tokens, num_response_tokens (generated ones), num_turns, is_truncated, policy_version.
    """
    samples = [sample for group in groups for sample in group]
    segments: list[Segment] = []
    for group in groups:
        prompt = Segment(np.asarray(group[0].prompt_ids, dtype=np.int32), None)
        for sample in group:
            segments += (prompt, *sample.segments)
    lengths = [len(segment.token_ids) for segment in segments]
    is_response = np.array([segment.logprobs is not None for segment in segments], dtype=np.uint8)
    zeros = np.zeros(max(lengths), dtype=np.float32)
    return FlatBatch(
        columns={
            INPUT_IDS.name: np.concatenate([segment.token_ids for segment in segments]),
            RESPONSE_MASK.name: np.repeat(is_response, lengths),
            GENERATION_LOGPROBS.name: np.concatenate(
                [
                    zeros[:length] if segment.logprobs is None else segment.logprobs
                    for segment, length in zip(segments, lengths, strict=True)
                ]
            ),
        },
        lengths=[sample.num_tokens for sample in samples],
        chunk_sizes=[len(group) for group in groups],
        tags=named(
            {
                GROUP_ID: [first_group + index for index, group in enumerate(groups) for _ in group],
                REWARD: [sample.reward or 0.0 for sample in samples],
                SAMPLE_MASK: [0 if sample.failure else 1 for sample in samples],
                NUM_PROMPT_TOKENS: [len(sample.prompt_ids) for sample in samples],
                NUM_RESPONSE_TOKENS: [sample.num_response_tokens for sample in samples],
                NUM_TURNS: [sample.num_turns for sample in samples],
                IS_TRUNCATED: [sample.is_truncated for sample in samples],
                POLICY_VERSION: [sample.policy_version for sample in samples],
            }
        ),
    )
