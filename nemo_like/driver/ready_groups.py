"""Groups that are scored and have their advantages, and the order in which they train.

parts of a step, each when its groups have ended ──join_parts──▶ the step's batch, in the order of its updates
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.algorithms.options import GRPOConfig, Overlap
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.sharding import by_generation
from nemo_like.configuration import Config
from nemo_like.driver.collection import in_order
from nemo_like.observability.metrics import merge
from nemo_like.plan.derived import first_update_generations
from nemo_like.policy.groups.results import ScoredBatch


@dataclass(frozen=True, slots=True)
class ReadyGroups:
    """Whole groups with every tag that training reads, and the results of the scoring phases."""

    batch: KVBatchMeta
    scored: ScoredBatch
    taught: ScoredBatch  # by a teacher
    valued: ScoredBatch  # by a critic
    accumulation_s: float = 0.0  # seconds inside the model, in which gradients were accumulated


def in_update_order(batch: KVBatchMeta, cfg: GRPOConfig) -> KVBatchMeta:
    """Return whole groups, given by (prompt, generation), in the order in which updates take their
    samples."""
    if not cfg.mix_groups_in_updates:
        return batch
    size = cfg.step_shape.num_generations
    return batch.subset(by_generation(len(batch) // size, size, cfg.samples_kept_together))


def first_update(batch: KVBatchMeta, cfg: Config) -> KVBatchMeta:
    """Return the samples of a part that the step's first update takes; the part is in the order of
    updates."""
    num_groups = len(batch) // cfg.grpo.step_shape.num_generations
    return batch.slice(0, num_groups * first_update_generations(cfg))


def num_accumulated(cfg: Config) -> int:
    """Return how many samples of a step are accumulated before all groups of the step have ended."""
    return cfg.policy.train_global_batch_size if cfg.grpo.overlap is Overlap.exact else 0


def join_parts(parts: Sequence[ReadyGroups], cfg: GRPOConfig) -> ReadyGroups:
    """Return the parts of a step as one, in the order of its updates."""
    if len(parts) == 1:
        return parts[0]
    batch = in_update_order(in_order(KVBatchMeta.concat([part.batch for part in parts])), cfg)
    return ReadyGroups(
        batch,
        _merged(batch, [part.scored for part in parts]),
        _merged(batch, [part.taught for part in parts]),
        _merged(batch, [part.valued for part in parts]),
        accumulation_s=sum(part.accumulation_s for part in parts),
    )


def _merged(batch: KVBatchMeta, parts: Sequence[ScoredBatch]) -> ScoredBatch:
    return ScoredBatch(
        batch=batch,
        metrics=merge(part.metrics for part in parts),
        compute_s=sum(part.compute_s for part in parts),
        operations=[operation for part in parts for operation in part.operations],
    )
