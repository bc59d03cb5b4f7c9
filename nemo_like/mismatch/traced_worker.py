"""``TracedWorker``: the policy worker of a run, which also trains on given tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
)
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.sharding import shard_for_training
from nemo_like.batch.tags import (
    ADVANTAGE,
    GROUP_ID,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    SAMPLE_MASK,
    Tag,
    by_tag_name,
)
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.groups.parallelism import train_strategy
from nemo_like.policy.workers.group_worker import schedule_of
from nemo_like.policy.workers.worker import PolicyWorker


class TracedWorker(PolicyWorker):
    """A ``PolicyWorker`` without a data plane: its samples come with the calls."""

    def setup(self) -> None:
        """Join the other workers and load the model; nothing is watched, since no step is judged here."""
        super().setup()
        self._watch = self._backend.watch = None

    def train_on(self, sequences: Sequence[Sequence[int]], num_prompt_tokens: int) -> None:
        """Make one optimizer update and count the version up by one; every rank calls it.

        The samples' advantages are 1 and -1 in turn. Each replica trains on all of them.
        """
        lengths = tuple(map(len, sequences))
        advantages = [1.0 - 2.0 * (row % 2) for row in range(len(lengths))]
        tags: dict[Tag[Any], Any] = {
            SAMPLE_MASK: (1,) * len(lengths),
            GROUP_ID: tuple(range(len(lengths))),
            NUM_PROMPT_TOKENS: (num_prompt_tokens,) * len(lengths),
            NUM_RESPONSE_TOKENS: tuple(length - num_prompt_tokens for length in lengths),
        }
        meta = KVBatchMeta(
            "train",
            tuple(Chunk(str(row), (length,)) for row, length in enumerate(lengths)),
            tuple((row, 0) for row in range(len(lengths))),
            frozenset(),
            by_tag_name(tags),
        )
        (shard,) = shard_for_training(
            meta, num_shards=1, global_batch_size=len(lengths), strategy=train_strategy(self.cfg)
        )
        masks = [np.arange(length) >= num_prompt_tokens for length in lengths]
        columns = {
            INPUT_IDS.name: np.concatenate([np.array(one, np.int32) for one in sequences]),
            RESPONSE_MASK.name: np.concatenate(masks).astype(np.uint8),
        }
        values = {ADVANTAGE.name: advantages, SAMPLE_MASK.name: [1.0] * len(lengths)}
        batch = PolicyBatch(columns, lengths, values, self._backend.device)
        own = self._backend.logprobs(batch, schedule_of(shard))
        # The loss reads some of these; all are of the weights in force, as in a first update.
        batch.add(dict.fromkeys((PREV_LOGPROBS, GENERATION_LOGPROBS, REFERENCE_LOGPROBS), own))
        torch.manual_seed(self.version)
        self._backend.train(batch, schedule_of(shard))
        self.version += 1
