"""The checkpoints of a run as its driver sees them: when to save, what to save, and where to continue.

save      policy workers ─▶ tmp_step_N/policy     (all ranks, their own format; while the run goes on)
          driver         ─▶ tmp_step_N/training_state.json, then renamed to step_N
resume    policy workers ◀─ step_N/policy          (hashed before: all ranks load it, or none)
          driver         ◀─ step, policy version, prompt order, counters
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.checkpoint.state import TrainingState
from nemo_like.checkpoint.store import (
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Retention,
    verify_policy_files,
)
from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.config.schema import CheckpointingConfig, CheckpointWriting
from nemo_like.data.sampler import MixtureSampler
from nemo_like.driver.interface import SavedPolicy
from nemo_like.observability.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How far a run has come."""

    step: int = 0  # rollout steps done
    policy_version: int = 0
    consumed_samples: int = 0  # responses generated for training
    valid_tokens: int = 0  # response tokens trained on

    def after(
        self, step: int, policy_version: int, metrics: Mapping[str, float], num_samples: int
    ) -> RunPosition:
        """Return the position after ``step``, which had these metrics.

        ``num_samples`` is the number of samples of one rollout; the metrics say how many rollouts the step
        took.
        """
        num_rollouts = int(metrics["train/dynamic_sampling_num_gen_batches"])
        return RunPosition(
            step=step,
            policy_version=policy_version,
            consumed_samples=self.consumed_samples + num_rollouts * num_samples,
            valid_tokens=self.valid_tokens + int(metrics["train/global_valid_toks"]),
        )


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that the policy workers are writing."""

    state: TrainingState
    policy: SavedPolicy


class RunCheckpoints:
    """The checkpoints of one run directory.

    ``found`` is the checkpoint to continue from, None for a new run. ``warnings`` say which checkpoints were
    set aside because they were not whole.
    """

    def __init__(self, cfg: CheckpointingConfig, directory: RunDirectory, expected_bytes: int) -> None:
        """Look for the checkpoints that earlier processes of this run left.

        ``expected_bytes`` is how large the first checkpoint will be. Raises CheckpointError when there are
        checkpoints, and none is whole.
        """
        self._cfg = cfg
        self.warnings: list[str] = []
        root = (
            directory.checkpoints_path if cfg.checkpoint_dir is None else Path(cfg.checkpoint_dir).absolute()
        )
        retention = Retention(cfg.keep_top_k, cfg.metric_name, cfg.higher_is_better)
        self._pending: _Pending | None = None
        self._store = CheckpointStore(root, retention, self.warnings.append, expected_bytes)
        self.found: Checkpoint | None = None
        if cfg.enabled and cfg.resume_if_exists:
            self._store.remove_unfinished()
            self.found = self._store.latest()

    @property
    def last_step(self) -> int:
        """The step of the checkpoint to continue from; -1 for a new run, before the validation at step 0."""
        return -1 if self.found is None else self.found.state.step

    @property
    def wandb_run_id(self) -> str | None:
        """The Weights & Biases id that the checkpoint to continue from names; None for a new run."""
        return None if self.found is None else self.found.state.wandb_run_id

    def verify(self, policy: SavedPolicy) -> None:
        """Have the policy workers hash the files that they will load, and set corrupt checkpoints aside.

        ``found`` is then the latest checkpoint whose files are what was written. ``warnings`` are replaced by
        those of this call. Raises CheckpointError when no checkpoint is left.
        """
        self.warnings.clear()
        if self.found is None:
            return

        def differing_files(path: Path, digests: Mapping[str, str]) -> Sequence[str]:
            return policy.corrupt_checkpoint_files(str(path), digests)

        self.found = self._store.latest(lambda one: verify_policy_files(one, differing_files))
        if self.found and not self.found.policy_digests:
            self.warnings.append(
                f"checkpoint {self.found.path} was written without digests, so nobody can tell whether its "
                "files are what was written; the next one has them"
            )

    def resume(self, policy: SavedPolicy, sampler: MixtureSampler) -> RunPosition:
        """Bring policy and prompt order to where the run stopped, and return that position.

        A new run changes nothing and gets the position of step 0. Raises CheckpointError when the
        configuration's data or seed are not the checkpoint's, or when it cannot be loaded.
        """
        if self.found is None:
            return RunPosition()
        state = self.found.state
        try:
            sampler.load_state_dict(state.sampler)  # type: ignore[arg-type]
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.found.path} cannot be continued: {error}") from None
        try:
            policy.load_checkpoint(str(self.found.policy_path), state.policy_version)
        except ActorFailed as error:
            raise CheckpointError(f"checkpoint {self.found.path} cannot be loaded: {error}") from error
        return RunPosition(state.step, state.policy_version, state.consumed_samples, state.valid_tokens)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step by ``checkpointing.save_period``."""
        period = self._cfg.save_period
        return period > 0 and step % period == 0

    def save(
        self,
        position: RunPosition,
        metrics: Mapping[str, float],
        policy: SavedPolicy,
        sampler: MixtureSampler,
        wandb_run_id: str,
    ) -> None:
        """Save the run as it stands after ``position.step``, which had ``metrics``.

        Does nothing where checkpoints are not enabled. The checkpoint before is completed first. With
        ``checkpointing.writing=background`` this returns while the workers still write; the checkpoint counts
        once ``settle`` or ``finish`` has completed it. Raises DiskFull when the disk is full, and
        CheckpointError when this checkpoint or the one before cannot be written for another reason; the whole
        ones stay.
        """
        if not self._cfg.enabled:
            return
        self.finish()
        sampler_state: dict[str, Any] = {**sampler.state_dict()}
        state = TrainingState(
            step=position.step,
            policy_version=position.policy_version,
            epoch=sampler.epoch,
            consumed_samples=position.consumed_samples,
            valid_tokens=position.valid_tokens,
            sampler=sampler_state,
            metrics=dict(metrics),
            wandb_run_id=wandb_run_id,
        )
        with self._store.writing(position.step) as policy_path, _write_errors(policy_path):
            policy.save_checkpoint(str(policy_path), self._cfg.writing)
        self._pending = _Pending(state, policy)
        if self._cfg.writing is CheckpointWriting.blocking:
            self.finish()

    def settle(self) -> None:
        """Complete the checkpoint under way if the workers have written it, without waiting for them.

        Raises what ``save`` raises.
        """
        if self._pending is None:
            return
        with self._guarded(self._pending.state.step):
            is_written = self._pending.policy.has_written_checkpoint()
        if is_written:
            self.finish()

    def finish(self) -> None:
        """Wait until the workers have written the checkpoint under way, if there is one, and complete it.

        Raises what ``save`` raises.
        """
        if self._pending is None:
            return
        with self._guarded(self._pending.state.step):
            self._store.finish(self._pending.state, self._pending.policy.wait_for_checkpoint())
        self._pending = None

    @contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        with self._store.guarded(step), _write_errors(self._store.path(step)):
            yield


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn ActorFailed from the block, a worker's error, into CheckpointError that names ``path``."""
    try:
        yield
    except ActorFailed as error:
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
