"""What a run's policy workers are asked for a search: to compute on given values, and their weights.
``PolicyWorker.look`` calls these functions by their paths. ``TracedWorker`` also trains on given tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.mismatch.points import LOGPROBS
from nemo_like.mismatch.substitution import Substitution, TensorPart
from nemo_like.mismatch.weight_words import WeightWords, weight_word
from nemo_like.models.model_info import read_model_info
from nemo_like.policy.backends.backend_kind import sequence_parts
from nemo_like.policy.backends.interface import TrainingBackend
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.groups.parallelism import gathers_weights, train_strategy
from nemo_like.policy.options import TrainedGroupConfig
from nemo_like.policy.workers.group_worker import schedule_of
from nemo_like.policy.workers.worker import PolicyWorker
from nemo_like.tripwires.weight_digests import word_sum


@dataclass(frozen=True, slots=True)
class RankTrace:
    """What one worker computed on the engine's values for T tokens."""

    coordinates: Coordinates
    points: dict[str, np.ndarray]  # this worker's part, float32
    divides_rows: bool
    dtype: str


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


def substituted(
    worker: PolicyWorker,
    backend: TrainingBackend,
    token_ids: Sequence[int],
    given: Mapping[str, np.ndarray],
) -> RankTrace:
    """Score the tokens at temperature 1 while every module gets the engine's values; every rank calls it.

    Raises ValueError for a backend whose modules are not known here.
    """
    cfg, coordinates = worker.cfg, worker.coordinates
    layout = coordinates.layout
    model = read_model_info(cfg.model_name, cfg.backend)
    divides_rows = layout.tp > 1 and sequence_parts(cfg) > 1
    part = TensorPart(coordinates.tp, layout.tp, divides_rows)
    substitution = Substitution(given, part, model.num_kv_heads // layout.tp)
    with _substituting(cfg, backend, substitution):
        logprobs = worker.canary_logprobs(token_ids)
    if coordinates.pp == layout.pp - 1:
        substitution.own[LOGPROBS] = np.array(logprobs, np.float32)[:, None]
    return RankTrace(coordinates, substitution.own, divides_rows, cfg.precision.name)


def weight_words(worker: PolicyWorker, backend: TrainingBackend) -> WeightWords:
    """Return digests of each weight of this pipeline stage, with adapters merged; every rank calls it, and
    only the weight sender is sure to get all."""
    words = WeightWords({}, {})
    if gathers_weights(worker.cfg, worker.coordinates):
        for name, tensor in backend.stage_weights():
            words.values[name], words.sent[name] = weight_word(tensor), int(word_sum(tensor))
    return words


def _substituting(
    cfg: TrainedGroupConfig, backend: Any, substitution: Substitution
) -> AbstractContextManager[None]:
    if cfg.backend == "fsdp":
        from nemo_like.mismatch import fsdp_hooks

        return fsdp_hooks.substituting(backend.model.causal_lm, substitution)
    if cfg.backend == "megatron":
        from nemo_like.mismatch import megatron_hooks

        return megatron_hooks.substituting(backend.model, substitution)
    raise ValueError(f"policy.backend={cfg.backend}: its modules are not known; use fsdp or megatron")
