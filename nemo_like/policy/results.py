"""What the policy worker group answers: metadata, metrics and seconds. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import Metric


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A log-prob phase: the batch with its new columns and tags; without a phase the batch alone."""

    batch: KVBatchMeta
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    compute_s: float = 0.0  # inside the model, the slowest worker's


@dataclass(frozen=True, slots=True)
class TrainUpdate:
    """A training phase: metrics already merged over ranks and updates."""

    metrics: Mapping[str, Metric]
    policy_version: int
    compute_s: float  # inside the model and optimizer, the slowest worker's
    operations: Sequence[Operation]  # the workers' in the data plane, since the training phase before


@dataclass(frozen=True, slots=True)
class WorkerScores:
    """A leader's answer to a log-prob phase, over its replica's shard; tags in the shard's order."""

    tags: Mapping[str, Sequence[float]]
    metrics: Mapping[str, Metric]
    compute_s: float


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """A leader's answer to a training phase: its replica's part of the metrics."""

    metrics: Mapping[str, Metric]
    policy_version: int
    compute_s: float
    operations: Sequence[Operation]  # the leader's in the data plane, since the training phase before
