"""Finished groups to packed columns and tags. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nemo_like.data_plane.meta import TagValue
from nemo_like.generation.interface import GroupResult


@dataclass(frozen=True, slots=True)
class FlatBatch:
    """N = sum of chunk_sizes samples, ordered by (prompt, generation); what ``DataPlane.put`` takes."""

    columns: dict[str, np.ndarray]  # each packed, [sum of lengths]
    lengths: list[int]  # tokens per sample, prompt and response
    chunk_sizes: list[int]  # one chunk per group
    tags: dict[str, Sequence[TagValue]]


def flatten(
    prompts: Sequence[Sequence[int]],
    groups: Sequence[GroupResult],
    rewards: Sequence[Sequence[float | None]],
    *,
    first_group: int = 0,
) -> FlatBatch:
    """Lay out prompt and response of every sample one after the other.

    ``prompts[i]``, ``groups[i]`` and ``rewards[i]`` belong together; ``rewards[i][j]`` is None where
    the environment failed, which masks the sample (reward 0, sample_mask 0). Groups are numbered from
    ``first_group``.

    Columns: input_ids int32; response_mask uint8, 1 on response tokens; generation_logprobs float32,
    nats, 0 on prompt tokens. Tags: group_id, reward, sample_mask, num_prompt_tokens,
    num_response_tokens, is_truncated, policy_version.
    """
    token_parts: list[np.ndarray] = []
    logprob_parts: list[np.ndarray] = []
    num_prompt: list[int] = []
    num_response: list[int] = []
    for prompt, group in zip(prompts, groups, strict=True):
        prompt_ids = np.asarray(prompt, dtype=np.int32)
        no_logprobs = np.zeros(len(prompt_ids), dtype=np.float32)
        for response in group.responses:
            token_parts += (prompt_ids, response.token_ids)
            logprob_parts += (no_logprobs, response.logprobs)
            num_prompt.append(len(prompt_ids))
            num_response.append(len(response.token_ids))
    segment_lengths = np.stack([num_prompt, num_response], axis=1).reshape(-1)
    is_response = np.tile(np.array([0, 1], dtype=np.uint8), len(num_prompt))
    flat_rewards = [reward for group_rewards in rewards for reward in group_rewards]
    responses = [response for group in groups for response in group.responses]
    return FlatBatch(
        columns={
            "input_ids": np.concatenate(token_parts),
            "response_mask": np.repeat(is_response, segment_lengths),
            "generation_logprobs": np.concatenate(logprob_parts),
        },
        lengths=[prompt + response for prompt, response in zip(num_prompt, num_response, strict=True)],
        chunk_sizes=[len(group.responses) for group in groups],
        tags={
            "group_id": [first_group + i for i, group in enumerate(groups) for _ in group.responses],
            "reward": [0.0 if reward is None else reward for reward in flat_rewards],
            "sample_mask": [0 if reward is None else 1 for reward in flat_rewards],
            "num_prompt_tokens": num_prompt,
            "num_response_tokens": num_response,
            "is_truncated": [response.is_truncated for response in responses],
            "policy_version": [group.policy_version for group in groups for _ in group.responses],
        },
    )
