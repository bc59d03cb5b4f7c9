"""What the policy worker needs from a training backend and from the weight transfer, as Protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_like.batch.meta import Schedule
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, SAMPLE_MASK
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.observability.metrics import Metric
from nemo_like.weight_transport.buckets import TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nemo_like.policy.batch import PolicyBatch
    from nemo_like.policy.checkpoint_writer import CheckpointWriter

# All tags that workers read, where a batch has them; beside them travel those by which it was scheduled.
WORKER_TAGS = (ADVANTAGE, SAMPLE_MASK, KL_SCALE)


class TrainingBackend(Protocol):
    """A model sharded over the workers of one layout. Every rank of a replica makes the same calls."""

    device: torch.device

    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Packed [sum of lengths] float32 on the CPU, nats; 0 where response_mask is 0. On every rank."""

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """The same under the weights the run started from."""

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """One optimizer update per global batch of the schedule; this replica's part of the metrics."""

    def weight_metadata(self) -> list[TensorSpec]:
        """What ``stage_weights`` will yield, in its order; no communication."""

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of this pipeline stage; collective over the ranks that hold parts
        of it, which all exhaust the iterator; complete on the sender."""

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads; every rank that gathers weights calls it."""

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Have weights, optimizer and update count written into the empty directory; every rank calls it."""

    def load_checkpoint(self, path: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, under any layout; every rank calls it."""


class WeightSender(Protocol):
    """The trainer's end of a weight transfer, one on every worker for which ``is_weight_sender`` holds."""

    def connect(self, receivers: Sequence[Any], tensors: Sequence[TensorSpec]) -> None:
        """Meet the receivers; ``tensors`` are what every later ``send`` brings, in order."""

    def send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Mapping[str, Metric]:
        """Bring every receiver to this version, and return once all have committed it."""

    def close(self) -> None:
        """Leave the receivers."""


@dataclass(frozen=True, slots=True)
class WeightSenderSpec:
    """How to build the sender in its process: "package.module:Class" and arguments but ``coordinates``."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)


def is_weight_sender(coordinates: Coordinates) -> bool:
    """The first tensor-parallel rank of each pipeline stage of the first replica."""
    return coordinates.dp == 0 and coordinates.cp == 0 and coordinates.tp == 0
