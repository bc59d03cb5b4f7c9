"""What the driver needs from the rest, as Protocols: each call takes and returns metadata and floats."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.config.schema import CheckpointWriting
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import Metric
from nemo_like.observability.summary import SampleAnswer
from nemo_like.policy.results import ScoredBatch, TrainUpdate
from nemo_like.rollout.prompts import PromptBatch, RolloutResult

T = TypeVar("T")


class Partitions(Protocol):
    """Life of the data plane's partitions."""

    def partition(self, name: str) -> AbstractContextManager[str]:
        """Open with every column declared; cleared on exit, also when the block raised."""

    def take_operations(self) -> Sequence[Operation]:
        """What was opened since the last time; nothing where nobody observes it."""


class Rollout(Protocol):
    """Prompts in, finished samples' metadata out."""

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Generate, reward, flatten and put; rows ordered by (prompt, generation)."""

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        """Free the bytes of samples that will not train; what that took in the data plane."""

    def sample_answers(self) -> Sequence[SampleAnswer]:
        """A few answers of the latest validation, in words."""

    def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write down the conversations of these samples with their tags, for people to read."""


class SavedPolicy(Protocol):
    """The policy worker group as checkpoints see it."""

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Write what training continues from into the empty directory ``path``; in the background, this
        returns when it is copied."""

    def has_written_checkpoint(self) -> bool:
        """Whether the latest checkpoint is on disk; raises ActorFailed when it could not be written."""

    def wait_for_checkpoint(self) -> Mapping[str, str]:
        """Wait until the latest checkpoint is on disk; the SHA-256 of its files by name. Raises ActorFailed
        when it could not be written."""

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> Sequence[str]:
        """Hash a checkpoint's files; names of those that differ from ``digests``."""

    def load_checkpoint(self, path: str, policy_version: int) -> None:
        """Continue from a checkpoint, which another parallel layout may have written."""


class Policy(SavedPolicy, Protocol):
    """The policy worker group, driven by metadata."""

    def compute_logprobs(self, batch: KVBatchMeta, columns: Sequence[Column]) -> ScoredBatch:
        """Adds these of the columns prev_logprobs and reference_logprobs, and their tags."""

    def train(self, batch: KVBatchMeta) -> TrainUpdate:
        """Every epoch's optimizer updates over the batch; needs tags advantage and sample_mask."""


class WeightSync(Protocol):
    """Keeps the generation engines at the trainer's weights."""

    def ensure_version(self, version: int) -> Mapping[str, Metric]:
        """Returns once every engine serves exactly this policy version."""

    def generation_is_over(self) -> None:
        """Until the next version is ensured nothing is generated: engines may give up what others need."""


class Recovery(Protocol):
    """Replaces processes that died while work was under way."""

    def completed(self, name: str, policy_version: int, work: Callable[[], T]) -> T:
        """What the work returns; where a process died that can be replaced, it is done again from its
        prompts, as if nothing had happened.

        Raises ActorDied when the process cannot be replaced, or the policy is no longer at this version.
        """


class StepObserver(Protocol):
    """Looks on while steps run."""

    def observing(self, step: int) -> AbstractContextManager[None]:
        """Around a step; may record what every process does."""

    def gpu_metrics(self) -> dict[str, float]:
        """What the GPUs did since the last call, under final names."""
