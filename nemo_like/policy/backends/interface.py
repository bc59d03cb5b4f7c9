"""What the policy worker needs from a training backend and from the weight transfer, as Protocols."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import Schedule
from nemo_like.batch.tags import (
    ADVANTAGE,
    IS_TRUNCATED,
    KL_SCALE,
    NUM_PROMPT_TOKENS,
    SAMPLE_DIGEST,
    SAMPLE_MASK,
    SHAPED_REWARD,
    TOKEN_SCALE,
    Tag,
)
from nemo_like.cluster.coordinates import Coordinates, MeetingPlace
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.generation.options import LoraSync
from nemo_like.observability.metrics import Metric
from nemo_like.policy.groups.parallelism import FIRST_REPLICA
from nemo_like.weight_transport.buckets import SentAdapter, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from nemo_like.algorithms.logprobs import TokenScores
    from nemo_like.policy.batch.policy_batch import PolicyBatch
    from nemo_like.policy.loss.update_watch import TrainingWatch
    from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter

# The tags that workers of the policy and of the critic read, where a batch has them. Those by which a batch
# is scheduled travel with them.
POLICY_TAGS: tuple[Tag[Any], ...] = (ADVANTAGE, SAMPLE_MASK, KL_SCALE, TOKEN_SCALE)
VALUE_TAGS: tuple[Tag[Any], ...] = (SAMPLE_MASK, SHAPED_REWARD, IS_TRUNCATED)
WORKER_TAGS = tuple(dict.fromkeys((*POLICY_TAGS, *VALUE_TAGS)))
# Further tags that workers compare with the columns.
TRIPWIRE_TAGS = (NUM_PROMPT_TOKENS, SAMPLE_DIGEST)


class TokenScorer(Protocol):
    """What scores samples."""

    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch; every rank returns all log-probs, packed [sum of lengths] float32 on the CPU, in
        nats; 0 where response_mask is 0."""

    def scores(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``logprobs`` does, and the ``top_k`` most likely tokens in the place of each
        token, if the objective asks for any: topk_logprobs float32 and topk_ids int32, packed [T, k]."""

    def scores_with_entropy(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``scores`` does, and compute the entropy of the distribution that each token was
        drawn from, packed [sum of lengths] float32 on the CPU, in nats; 0 where response_mask is 0."""

    def values(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Value the batch by the model of a critic; every rank returns all values, packed [sum of lengths]
        float32 on the CPU, at the places of column values."""

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch as ``logprobs`` does, under the weights that the run started from."""


class ScoringState(Protocol):
    """What the phases of scoring change of a model, and what is measured meanwhile."""

    def at_temperature_one(self) -> AbstractContextManager[None]:
        """Have ``logprobs`` score at temperature 1 within the block."""

    def weights_of(self, model: str) -> AbstractContextManager[None]:
        """Have the model score by the weights of ``model`` within the block: those of its own checkpoint, or
        of one of the objective's ``further_models``."""

    def routing_metrics(self) -> dict[str, Metric]:
        """Return what was measured, since the last call, of routers that replay the engine's choices; every
        rank of a replica calls it. Empty where none do."""


class Trainer(Protocol):
    """What trains on samples. The ``watch``, if there is one, sees weights and optimizer before and after a
    training phase, and every loss on the ranks that compute it."""

    watch: TrainingWatch | None

    def accumulate(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """Add the gradient of the loss of all global batches of the schedule, not normalised, to what this
        rank holds for the first update of the next ``train``.

        Scoring in between leaves what is held as it is; loading a checkpoint drops it.
        """

    def drop_accumulated(self) -> None:
        """Forget what was accumulated for the next ``train``; other ranks need not call it too."""

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """Make one optimizer update per global batch of the schedule; return this replica's part of the
        metrics.

        After ``accumulate``, the first global batch has no micro-batches, and the counts of all that was
        accumulated. Raises RuntimeError when it has some then, or has none without it.
        """


class WeightSource(Protocol):
    """What the weights of a model are taken from."""

    def weight_metadata(self) -> list[TensorSpec]:
        """Describe what ``stage_weights`` will yield, in its order, without communication."""

    def stage_weights(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for every tensor of this pipeline stage.

        Collective over the ranks for which ``gathers_weights`` holds with these replicas: all of them must
        exhaust the iterator. Only their weight senders are sure to get every tensor.
        """

    def adapter_config(self) -> Mapping[str, Any] | None:
        """Return the contents of peft's adapter_config.json, as plain JSON values; None when the whole model
        trains."""

    def adapter_metadata(self) -> list[TensorSpec]:
        """Describe what ``stage_adapters`` will yield, in its order, without communication; empty when the
        whole model trains."""

    def stage_adapters(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as peft saves it, full tensor in float32) for every adapter of this pipeline stage, A
        [rank, inputs] and B [outputs, rank].

        It is collective as ``stage_weights`` is. A tensor may be the model's own, which leaves the device
        when the iterator ends: a caller copies what it keeps.
        """

    def reference_weights(self) -> Sequence[Tensor]:
        """Return this rank's part of the reference's weights on the host; none where no copy is kept."""


class Persistent(Protocol):
    """What a checkpoint keeps, and what is left at the end."""

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Hand what trains, the optimizer and the update count to ``writer``, which writes them into the
        empty directory ``path``; every rank calls it. Weights beside adapters stay as they are in
        policy.model_name, and are not in a checkpoint."""

    def load_checkpoint(self, path: Path) -> None:
        """Continue from what ``save_checkpoint`` wrote, whatever layout wrote it; every rank calls it."""

    def random_states(self) -> Mapping[str, Tensor]:
        """Return the states of the random generators that this backend keeps beside torch's, by name."""

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Put these generators into states that ``random_states`` returned; none leaves them as they are."""

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads, and inside it a directory with the adapters,
        if there are any, for peft; every rank that gathers weights calls it."""


class TrainingBackend(TokenScorer, ScoringState, Trainer, WeightSource, Persistent, Protocol):
    """A model sharded over the workers of one layout. Every rank of a replica must make the same calls."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker is: its rank among the group's, which meet at ``meeting_place``, and the data plane that
    it reads and writes, an object or a description from which ``setup`` makes one in the worker's process.
    ``timeout_s`` bounds every collective of the group."""

    coordinates: Coordinates
    data_plane: DataPlane | DataPlaneSpec
    meeting_place: MeetingPlace
    timeout_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherColumns:
    """Columns of the policy's phases besides those that the loss and the model need.

    Training reads ``reads`` too, which other groups write, and every phase ``inputs``; some steps ask for
    ``writes``.
    """

    reads: Sequence[Column] = ()
    inputs: Sequence[Column] = ()
    writes: Sequence[Column] = ()


class WeightSender(Protocol):
    """The trainer's end of a weight transfer, one on every worker for which ``is_weight_sender`` holds."""

    def connect(
        self, receivers: Sequence[Any], tensors: Sequence[TensorSpec], adapter: SentAdapter | None = None
    ) -> None:
        """Connect to the receivers; every later ``send`` sends ``tensors``, in this order. With ``adapter``
        these are adapters, which the receivers compute beside the weights that they have."""

    def send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Mapping[str, Metric]:
        """Send ``weights`` to every receiver as policy version ``version``; return once all have committed
        it."""

    def close(self) -> None:
        """Close the connection to the receivers."""


@dataclass(frozen=True, slots=True)
class WeightSenderSpec:
    """How a worker builds its sender: the class as "package.module:Class", and all arguments but
    ``coordinates``, which the worker adds."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora_sync: LoraSync = LoraSync.merged


def is_weight_sender(coordinates: Coordinates, replicas: Sequence[int] = FIRST_REPLICA) -> bool:
    """Return whether this worker sends the weights of these replicas: the first tensor- and context-parallel
    rank of each of their pipeline stages does."""
    return coordinates.dp in replicas and coordinates.cp == 0 and coordinates.tp == 0
