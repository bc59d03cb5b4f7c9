"""What the policy worker needs from a training backend and from the weight transfer, as Protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.meta import Schedule
from nemo_like.observability.metrics import Metric

if TYPE_CHECKING:
    from torch import Tensor

    from nemo_like.policy.batch import PolicyBatch

# Tags that training needs on every sample.
ADVANTAGE = "advantage"
SAMPLE_MASK = "sample_mask"  # 0: the sample does not train


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """A tensor as it will be sent: Hugging Face name, full shape, dtype by its torch name ("bfloat16")."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class TrainingBackend(Protocol):
    """A model sharded over the workers of one layout. Every rank of a replica makes the same calls."""

    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Packed [sum of lengths] float32 on the CPU, nats; 0 where response_mask is 0. Valid on every rank."""

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """The same under the weights the run started from."""

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """One optimizer update per global batch of the schedule; this replica's part of the metrics."""

    def weight_metadata(self) -> list[WeightSpec]:
        """What ``stage_weights`` will yield, in its order; no communication."""

    def stage_weights(self) -> Iterator[tuple[str, Tensor]]:
        """(Hugging Face name, full tensor) of this pipeline stage; collective over the tensor-parallel group."""

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads; every rank of data-parallel rank 0 calls it."""


class WeightSender(Protocol):
    """The trainer's end of a weight transfer. One lives on the first tensor-parallel rank of each stage
    of data-parallel rank 0."""

    def connect(self, coordinates: Coordinates, weights: Sequence[WeightSpec]) -> None:
        """Meet the receivers; ``weights`` are what every later ``send`` brings, in order."""

    def send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Mapping[str, Metric]:
        """Bring every receiver to this version, and return once all have committed it."""

    def close(self) -> None:
        """Leave the receivers."""
