"""A rollout whose rewards are written down beforehand, over a real data plane within this process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import summed
from nemo_like.rollout.prompts import PromptBatch, RolloutResult, WantedGroups

PARTITION = "train-1"
NUM_TOKENS = 8192  # of every sample; a group has more bytes than what small chunks share a storage key for
NUM_RESPONSE_TOKENS = 4
NO_SECONDS = {"generation_s": 0.0, "reward_s": 0.0, "put_s": 0.0}
BYTES_PER_SAMPLE = NUM_TOKENS * (4 + 1 + 4)


class AnyOrder:
    """The order of a run that follows no journal, and writes none."""

    is_on = False

    def begun(self, prompts: PromptBatch) -> None: ...

    def wanted(self, prompts: PromptBatch, at_least: int) -> WantedGroups:
        return WantedGroups(at_least)

    def took(self, prompts: PromptBatch, positions: Sequence[int]) -> None: ...

    def trained(self, step: int) -> None: ...

    def abandoned(self, work: str) -> None: ...


class ScriptedRollout:
    """``rewards[k][i]`` are those of group i of the k-th rollout; None is a failed reward.

    Where a rollout comes in parts, its groups end in the order ``ends``.
    """

    def __init__(
        self, rewards: Iterable[Sequence[Sequence[float | None]]], ends: Sequence[int] | None = None
    ) -> None:
        self.plane = InMemoryDataPlane()
        self.plane.open_partition(PARTITION, ROLLOUT_COLUMNS)
        self.asked: list[PromptBatch] = []
        self.bytes_after_discard: list[int] = []
        self._rewards = iter(rewards)
        self._ends = ends
        self._left: list[KVBatchMeta] = []  # groups of the rollout under way, in the order of their ends

    def begin(self, prompts: PromptBatch, partition: str) -> None:
        self.asked.append(prompts)
        batch = self._sampled(prompts, partition)
        size = len(batch) // len(prompts)
        groups = [batch.slice(start, start + size) for start in range(0, len(batch), size)]
        self._left = [groups[place] for place in self._ends or range(len(groups))]

    def next_part(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        part, self._left = self._left[: wanted.at_least], self._left[wanted.at_least :]
        batch = KVBatchMeta.concat(part)
        metrics = {"total_num_tokens": summed(NUM_TOKENS * len(batch))}
        whole = not self._left
        seconds = {"generation_s": 2.0, "reward_s": 0.5, "put_s": 0.25} if whole else NO_SECONDS
        return RolloutResult(batch, metrics, **seconds, operations=(), is_last=whole)

    def _sampled(self, prompts: PromptBatch, partition: str) -> KVBatchMeta:
        groups = next(self._rewards)
        flat = [reward for group in groups for reward in group]
        count = len(flat)
        mask = np.tile((np.arange(NUM_TOKENS) >= NUM_TOKENS - NUM_RESPONSE_TOKENS).astype(np.uint8), count)
        return self.plane.put(
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
                "is_judged": [reward is not None for reward in flat],
                "num_prompt_tokens": [NUM_TOKENS - NUM_RESPONSE_TOKENS] * count,
                "num_response_tokens": [NUM_RESPONSE_TOKENS] * count,
                "is_truncated": [False] * count,
                "policy_version": [prompts.policy_version] * count,
            },
        )

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        for batch in batches:
            self.plane.clear(batch)
        self.bytes_after_discard.append(self.plane.host.storage.num_bytes)
        return [Operation("clear", {}, 0.0)]
