"""The parts that the driver calls, as Protocols; their calls take and return metadata and floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import Metric
from nemo_like.observability.summary import SampleAnswer
from nemo_like.policy.groups.results import Accumulation, ScoredBatch, TrainUpdate
from nemo_like.rollout.prompts import PromptBatch, RolloutResult, WantedGroups

T = TypeVar("T")


class Partitions(Protocol):
    """Opens and closes the data plane's partitions."""

    def partition(self, name: str) -> AbstractContextManager[str]:
        """Open a partition with every column declared; close it on exit, also when the block raised."""

    def open(self, name: str) -> None:
        """Open a partition with every column declared; ``close`` must close it."""

    def close(self, name: str) -> None:
        """Close a partition and drop all samples in it."""

    def take_operations(self) -> Sequence[Operation]:
        """Return the partition openings since the last call; empty unless ``data_plane.log_operations`` is
        set."""


class Rollout(Protocol):
    """Samples and rewards: takes prompts and returns the metadata of finished samples."""

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Generate, reward, flatten and put the samples of ``prompts``, ordered by (prompt, generation)."""

    def begin(self, prompts: PromptBatch, partition: str) -> None:
        """Begin the work of ``run``, and return at once."""

    def begin_step(self, step: int) -> None:
        """Grant samples under way their tokens of ``step``, with ``rollout.max_tokens_per_step``."""

    def next_part(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        """Wait for further groups of a rollout that has begun, and return them."""

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        """Clear samples that will not train; return the data-plane operations that this took."""

    def sample_answers(self) -> Sequence[SampleAnswer]:
        """Return a few answers of the latest validation, as text."""

    def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write the conversations and tags of these samples into a file for people to read."""


class SavedPrompts(Protocol):
    """The order of prompts, as checkpoints save and restore it."""

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the order, as JSON can hold it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state``. Raises KeyError or ValueError when it belongs to other data."""


class SavedGroup(Protocol):
    """A worker group, as checkpoints save and restore it."""

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Write everything that training needs to continue into the empty directory ``path``.

        With writing in the background, return as soon as it is copied, before it is on disk.
        """

    def has_written_checkpoint(self) -> bool:
        """Return whether the latest checkpoint is on disk. Raises ActorFailed when it cannot be written."""

    def wait_for_checkpoint(self) -> Mapping[str, str]:
        """Wait until the latest checkpoint is on disk, and return the SHA-256 of each of its files by name.

        Raises ActorFailed when it cannot be written.
        """

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> Sequence[str]:
        """Hash a checkpoint's files, and return the names of files that differ from ``digests``."""

    def load_checkpoint(self, path: str, version: int, parts: ResumeParts) -> None:
        """Load these parts of a checkpoint as policy version ``version``; another parallel layout may have
        written it."""


class Policy(SavedGroup, Protocol):
    """The policy worker group, as a step uses it."""

    def compute_logprobs(self, batch: KVBatchMeta, columns: Sequence[Column]) -> ScoredBatch:
        """Have the workers compute and write ``columns``: prev_logprobs, reference_logprobs or both;
        entropies only together with prev_logprobs.

        The returned batch names these columns and carries their tags.
        """

    def accumulate(self, batch: KVBatchMeta) -> Accumulation:
        """Add the gradient of these samples to the gradient that the workers hold for the step's first
        update. The samples are a part of that update, and have all tags that ``train`` needs, with the same
        values."""

    def train(self, batch: KVBatchMeta, *, num_accumulated: int = 0) -> TrainUpdate:
        """Make every epoch's updates over the batch, which needs the tags advantage and sample_mask.

        ``num_accumulated`` is how many samples were accumulated: none, or all of the first update.
        """

    def export_hf(self, path: str) -> None:
        """Write a Hugging Face checkpoint directory."""

    def skip(self, batch: KVBatchMeta) -> TrainUpdate:
        """End a step without training on its ``batch``; return once its computed columns are written."""


class Value(SavedGroup, Protocol):
    """The worker group of a critic, as a step uses it."""

    def compute_values(self, batch: KVBatchMeta) -> ScoredBatch:
        """Have the workers value the batch and write values, returns and advantages of its tokens.

        The returned batch names these columns and carries the sums of the advantages as tags.
        """

    def train(self, batch: KVBatchMeta) -> TrainUpdate:
        """Make every epoch's updates of the critic over the batch, which needs the tag sample_mask."""


class Teacher(Protocol):
    """The worker group of a teacher, as a step uses it."""

    def compute_teacher_logprobs(self, batch: KVBatchMeta) -> ScoredBatch:
        """Have the workers score the batch and write the teacher's columns that the loss reads.

        The returned batch names these columns.
        """


class WeightSync(Protocol):
    """Keeps the generation engines at the trainer's weights."""

    @property
    def digest(self) -> float | None:
        """The digest of the weights that the trainer sent last; None when it computes none."""

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Return once every engine serves exactly this policy version."""

    def end_generation(self) -> None:
        """Let engines release the GPUs that they share with the trainer; the next ``ensure_version`` wakes
        them."""


class CanaryScores(Protocol):
    """Compares how engines and trainer score the same tokens."""

    def gap(self) -> float:
        """Return how far the worst engine is from the trainer, nats per token."""


class Recovery(Protocol):
    """Replaces processes that died while work was under way."""

    def completed(self, name: str, policy_version: int, work: Callable[[], T]) -> T:
        """Do ``work`` and return its result; ``name`` describes it in warnings.

        When a process that can be replaced dies meanwhile, or raises an error after which it is useless,
        replace it and do the work again with the same prompts. Raises ActorDied when the process cannot be
        replaced, when the same error comes again, or when the policy is no longer at ``policy_version``.
        """


class StepObserver(Protocol):
    """Records traces, profiles and GPU use while steps run."""

    def observing(self, step: int) -> AbstractContextManager[None]:
        """Record the work of every process while the block runs, if the configuration asks for this step."""

    def gpu_metrics(self) -> dict[str, float]:
        """Return how busy and full the GPUs were since the last call, under the metrics' final names."""
