"""A rollout whose rewards are written down beforehand, over a real data plane within this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import summed
from nemo_like.rollout.prompts import PromptBatch, RolloutResult

PARTITION = "train-1"
NUM_TOKENS = 8192  # of every sample; a group has more bytes than what small chunks share a storage key for
NUM_RESPONSE_TOKENS = 4
BYTES_PER_SAMPLE = NUM_TOKENS * (4 + 1 + 4)


class ScriptedRollout:
    """``rewards[k][i]`` are those of group i of the k-th rollout; None is a failed reward."""

    def __init__(self, rewards: Iterable[Sequence[Sequence[float | None]]]) -> None:
        self.plane = InMemoryDataPlane()
        self.plane.open_partition(PARTITION, ROLLOUT_COLUMNS)
        self.asked: list[PromptBatch] = []
        self.bytes_after_discard: list[int] = []
        self._rewards = iter(rewards)

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        self.asked.append(prompts)
        groups = next(self._rewards)
        flat = [reward for group in groups for reward in group]
        count = len(flat)
        mask = np.tile((np.arange(NUM_TOKENS) >= NUM_TOKENS - NUM_RESPONSE_TOKENS).astype(np.uint8), count)
        batch = self.plane.put(
            partition,
            {
                "input_ids": np.arange(count * NUM_TOKENS, dtype=np.int32),
                "response_mask": mask,
                "generation_logprobs": -mask.astype(np.float32),
            },
            lengths=[NUM_TOKENS] * count,
            chunk_sizes=[len(group) for group in groups],
            tags={
                "group_id": [prompts.first_group + i for i, group in enumerate(groups) for _ in group],
                "reward": [0.0 if reward is None else reward for reward in flat],
                "sample_mask": [0 if reward is None else 1 for reward in flat],
                "num_prompt_tokens": [NUM_TOKENS - NUM_RESPONSE_TOKENS] * count,
                "num_response_tokens": [NUM_RESPONSE_TOKENS] * count,
                "is_truncated": [False] * count,
                "policy_version": [prompts.policy_version] * count,
            },
        )
        metrics = {"total_num_tokens": summed(NUM_TOKENS * count)}
        return RolloutResult(batch, metrics, generation_s=2.0, reward_s=0.5, put_s=0.25, operations=())

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        for batch in batches:
            self.plane.clear(batch)
        self.bytes_after_discard.append(self.plane.host.storage.num_bytes)
        return [Operation("clear", {}, 0.0)]
