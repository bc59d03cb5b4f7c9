"""What the policy worker group answers: metadata, metrics and seconds. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.observability.metrics import Metric


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """A log-prob phase: the batch with its new column and tags."""

    batch: KVBatchMeta
    metrics: Mapping[str, Metric]
    compute_s: float  # inside the model, the slowest worker's


@dataclass(frozen=True, slots=True)
class TrainUpdate:
    """A training phase: metrics already merged over ranks and updates."""

    metrics: Mapping[str, Metric]
    policy_version: int
    compute_s: float  # inside the model and optimizer, the slowest worker's
