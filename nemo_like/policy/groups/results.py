"""The answers of policy workers and of their group: metadata, metrics and seconds. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import Metric


@dataclass(frozen=True, slots=True)
class ScoredBatch:
    """The group's answer to a phase that scores or values: the batch with its new columns and tags.

    In a step without such a phase it holds the batch unchanged, and the defaults.
    """

    batch: KVBatchMeta
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    compute_s: float = 0.0  # seconds inside the model on the slowest leader
    operations: Sequence[Operation] = ()  # in the data plane, by leaders that do not train


@dataclass(frozen=True, slots=True)
class Accumulation:
    """The group's answer when it has accumulated the gradients of some samples.

    Metrics and operations in the data plane come with the later ``TrainUpdate``.
    """

    num_computed: int  # samples; idle ones need not be computed
    compute_s: float  # seconds inside the model on the slowest leader


@dataclass(frozen=True, slots=True)
class TrainUpdate:
    """The group's answer to a training phase, with metrics merged over replicas and updates."""

    metrics: Mapping[str, Metric]
    version: int  # of the group's weights: how many training phases they have seen
    compute_s: float  # seconds inside the model and the optimizer on the slowest leader
    operations: Sequence[Operation]  # what the leaders did in the data plane since the last training phase
    measured: Mapping[str, Metric] = field(default_factory=dict)  # for the tripwires
    named: Sequence[str] = ()  # tensors that the measurements blame
    # By replica and update of one epoch: (response tokens, samples) that the loss is normalised by.
    planned_counts: Sequence[Sequence[tuple[int, int]]] = ()


@dataclass(frozen=True, slots=True)
class WorkerScores:
    """A leader's answer to a phase that scores or values its replica's shard; tags are in the shard's
    order."""

    tags: Mapping[str, Sequence[float]]
    metrics: Mapping[str, Metric]
    compute_s: float
    operations: Sequence[Operation] = ()  # what a leader that does not train did in the data plane


@dataclass(frozen=True, slots=True)
class WorkerUpdate:
    """A leader's answer to a training phase, with its replica's part of the metrics."""

    metrics: Mapping[str, Metric]
    version: int  # of the group's weights: how many training phases they have seen
    compute_s: float
    operations: Sequence[Operation]  # what the leader did in the data plane since the last training phase
    measured: Mapping[str, Metric] = field(default_factory=dict)  # for the tripwires
    named: Sequence[str] = ()  # tensors that the measurements blame
