"""Protocols of the training backend and the weight sender, which workers use."""

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
    ADVANTAGE_DIGEST,
    ENTROPY_COEF,
    IS_TRUNCATED,
    KL_SCALE,
    LIKELIHOOD_WEIGHT,
    NUM_PROMPT_TOKENS,
    SAMPLE_DIGEST,
    SAMPLE_MASK,
    SHAPED_REWARD,
    TOKEN_SCALE,
    Tag,
)
from nemo_like.checkpoint.options import ResumeParts
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

# The tags that workers of the policy and of the critic read, where a batch has them. The tags that schedule a
# batch travel with them.
POLICY_TAGS: tuple[Tag[Any], ...] = (
    ADVANTAGE,
    SAMPLE_MASK,
    KL_SCALE,
    TOKEN_SCALE,
    LIKELIHOOD_WEIGHT,
    ENTROPY_COEF,
)
VALUE_TAGS: tuple[Tag[Any], ...] = (SAMPLE_MASK, SHAPED_REWARD, IS_TRUNCATED)
WORKER_TAGS = tuple(dict.fromkeys((*POLICY_TAGS, *VALUE_TAGS)))
# Further tags that workers compare with the columns.
TRIPWIRE_TAGS = (NUM_PROMPT_TOKENS, SAMPLE_DIGEST, ADVANTAGE_DIGEST)


class TokenScorer(Protocol):
    """Scores samples."""

    def logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch; every rank returns all log-probs, packed [sum of lengths] float32 on the CPU, in
        nats; 0 where response_mask is 0."""

    def scores(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``logprobs`` does, and find the ``top_k`` most likely tokens in place of each
        token if the objective asks for any: topk_logprobs float32 and topk_ids int32, packed [T, k]."""

    def scores_with_entropy(self, batch: PolicyBatch, schedule: Schedule) -> TokenScores:
        """Score the batch as ``scores`` does, and compute the entropy of the distribution that each token was
        drawn from, packed [sum of lengths] float32 on the CPU, in nats; 0 where response_mask is 0."""

    def values(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Value the batch with a critic's model; every rank returns all values, packed [sum of lengths]
        float32 on the CPU, laid out as column values."""

    def reference_logprobs(self, batch: PolicyBatch, schedule: Schedule) -> Tensor:
        """Score the batch as ``logprobs`` does, under the weights that the run started from."""


class ScoringState(Protocol):
    """Changes how a model scores within a block, and reports what is measured while it scores."""

    def at_temperature_one(self) -> AbstractContextManager[None]:
        """Have ``logprobs`` score at temperature 1 within the block."""

    def weights_of(self, model: str) -> AbstractContextManager[None]:
        """Have the model score with the weights of ``model`` within the block: its own checkpoint, or one of
        the objective's ``further_models``."""

    def routing_metrics(self) -> dict[str, Metric]:
        """Return the metrics, since the last call, of routers that replay the engine's choices; empty where
        none replay. Every rank of a replica calls it."""


class Trainer(Protocol):
    """Trains on samples. The ``watch``, if there is one, sees weights and optimizer before and after a
    training phase, and every loss on the ranks that compute it."""

    watch: TrainingWatch | None

    def accumulate(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """Add the gradient of the loss of all global batches of the schedule, not normalised, to the
        gradients that this rank holds for the first update of the next ``train``.

        Scoring in between does not change them; loading a checkpoint drops them.
        """

    def drop_accumulated(self) -> None:
        """Forget the accumulated gradients; other ranks need not call it too."""

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """Make one optimizer update per global batch of the schedule; return this replica's part of the
        metrics.

        After ``accumulate``, the first global batch must have no micro-batches, and the counts of all
        accumulated samples. Raises RuntimeError when it then has micro-batches, or has none without
        ``accumulate``.
        """


class WeightSource(Protocol):
    """Yields and describes the weights of a model."""

    def weight_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_weights`` will yield, in its order, without communication."""

    def stage_weights(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (Hugging Face name, full tensor) for every tensor of this pipeline stage.

        The call is collective over all ranks for which ``gathers_weights`` holds with these replicas: each
        must exhaust the iterator. Only the weight senders of the replicas are sure to get every tensor.
        """

    def adapter_config(self) -> Mapping[str, Any] | None:
        """Return the contents of peft's adapter_config.json, as plain JSON values; None when the whole model
        trains."""

    def adapter_metadata(self) -> list[TensorSpec]:
        """Describe the tensors that ``stage_adapters`` will yield, in its order, without communication;
        return an empty list when the whole model trains."""

    def stage_adapters(self, replicas: Sequence[int] = FIRST_REPLICA) -> Iterator[tuple[str, Tensor]]:
        """Yield (name as peft saves it, full tensor in float32) for every adapter of this pipeline stage, A
        [rank, inputs] and B [outputs, rank].

        It is collective like ``stage_weights``. A tensor may be the model's own, which leaves the device when
        the iterator ends, so a caller copies the tensors that it keeps.
        """

    def reference_weights(self) -> Sequence[Tensor]:
        """Return this rank's part of the reference's weights on the host; empty where no copy is kept."""

    @property
    def has_new_reference(self) -> bool:
        """Whether the reference's weights are meant to differ from those that the run began with."""

    def renew_reference(self, weight: float) -> None:
        """Move the reference's weights towards the model's, as ``KeptWeights.mix`` does; needs a kept copy.

        From then on checkpoints have the reference's weights too.
        """


class Persistent(Protocol):
    """Saves and restores training, and exports the model."""

    def state_digests(self) -> dict[str, int]:
        """Return the digests of this rank's weights and of its optimizer's state, by name."""

    def vectors(self) -> dict[str, Tensor]:
        """Return copies of some of this rank's weights of one dimension, or of its parts of them, by name."""

    def save_checkpoint(self, path: Path, writer: CheckpointWriter) -> None:
        """Give the trained weights, the optimizer and the update count to ``writer``, which writes them into
        the empty directory ``path``; every rank calls it.

        Frozen weights beside adapters are not in a checkpoint; they are still in policy.model_name.
        """

    def load_checkpoint(self, path: Path, parts: ResumeParts) -> None:
        """Take these parts of a checkpoint of ``save_checkpoint``, which any layout may have written; every
        rank calls it. Without all of them the count of updates begins anew."""

    def random_states(self) -> Mapping[str, Tensor]:
        """Return the states of the random generators that this backend keeps besides torch's, by name."""

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states that ``random_states`` returned; an empty mapping changes nothing."""

    def export_hf(self, path: Path) -> None:
        """Write a checkpoint directory that transformers loads, and inside it a directory with the adapters
        for peft, if there are any; every rank that gathers weights calls it."""


class TrainingBackend(TokenScorer, ScoringState, Trainer, WeightSource, Persistent, Protocol):
    """A model sharded over the workers of one layout. Every rank of a replica must make the same calls."""

    device: torch.device


@dataclass(frozen=True, slots=True)
class WorkerConnections:
    """A worker's rank in its group, where the group's workers meet, and the data plane that it uses.

    ``data_plane`` is an object, or a description from which ``setup`` makes one in the worker's process;
    None for a worker that fetches no samples.
    ``timeout_s`` bounds every collective of the group. Every phase also reads the columns ``inputs``.
    """

    coordinates: Coordinates
    data_plane: DataPlane | DataPlaneSpec | None
    meeting_place: MeetingPlace
    timeout_s: float
    inputs: Sequence[Column] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherColumns:
    """Columns that the policy's phases use besides those of the loss and the model.

    Training also reads ``reads``, which other groups write. Some steps also write ``writes``.
    """

    reads: Sequence[Column] = ()
    writes: Sequence[Column] = ()


class WeightSender(Protocol):
    """The trainer's end of a weight transfer, one on every worker for which ``is_weight_sender`` holds."""

    def connect(
        self, receivers: Sequence[Any], tensors: Sequence[TensorSpec], adapter: SentAdapter | None = None
    ) -> None:
        """Connect to the receivers; every later ``send`` sends ``tensors``, in this order. With ``adapter``
        the tensors are low-rank adapters, which the receivers apply beside the weights that they hold."""

    def send(self, version: int, weights: Iterator[tuple[str, Tensor]]) -> Mapping[str, Metric]:
        """Send ``weights`` to every receiver as policy version ``version``; return once all receivers have
        committed it."""

    def close(self) -> None:
        """Close the connection to the receivers."""


@dataclass(frozen=True, slots=True)
class WeightSenderSpec:
    """Describes how a worker builds its sender: the class as "package.module:Class", and all arguments but
    ``coordinates``, which the worker adds."""

    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    lora_sync: LoraSync = LoraSync.merged


def is_weight_sender(coordinates: Coordinates, replicas: Sequence[int] = FIRST_REPLICA) -> bool:
    """Return whether this worker sends weights for ``replicas``: in each of their pipeline stages the first
    tensor- and context-parallel rank does."""
    return coordinates.dp in replicas and coordinates.cp == 0 and coordinates.tp == 0
