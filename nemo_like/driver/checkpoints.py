"""The driver's part of checkpoints: when to save, what to save, and where to continue.

save      worker groups  ─▶ tmp_step_N/policy, .../value (all ranks, own format, while the run goes on)
          policy         ─▶ tmp_step_N/hf                (with checkpointing.export_hf; the run waits)
          driver         ─▶ tmp_step_N/training_state.json, then renamed to step_N
resume    worker groups  ◀─ step_N/policy, step_N/value     (hashed before: all ranks load it, or none)
          driver         ◀─ step, policy version, prompt order, counters
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any

from nemo_like.checkpoint.options import CheckpointingConfig, CheckpointWriting, ResumeParts
from nemo_like.checkpoint.state import TrainingState
from nemo_like.checkpoint.store import (
    HF_FOLDER,
    POLICY_GROUP,
    VALUE_GROUP,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    Retention,
    read_checkpoint,
    verify_group_files,
)
from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.configuration import Config
from nemo_like.driver.data_identity import other_held_out_data, other_training_data, saved_data
from nemo_like.driver.final_export import PolicyExport
from nemo_like.driver.interface import SavedGroup, SavedPrompts
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rollout.prompts import SourceReports


@dataclass(frozen=True, slots=True)
class RunPosition:
    """How many steps, policy versions, samples and tokens a run has done."""

    step: int = 0  # rollout steps done
    policy_version: int = 0
    consumed_samples: int = 0  # responses generated for training
    valid_tokens: int = 0  # response tokens trained on

    def after(
        self, step: int, policy_version: int, metrics: Mapping[str, float], num_samples: int
    ) -> RunPosition:
        """Return the position after ``step``, whose metrics these are.

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


# The worker groups of a run by name; each has a directory of this name in a checkpoint.
SavedGroups = Mapping[str, SavedGroup]


def saved_groups(policy: SavedGroup, value: SavedGroup | None) -> SavedGroups:
    """Return the worker groups of a run by name; ``value`` is None without a critic."""
    return {POLICY_GROUP: policy, **({} if value is None else {VALUE_GROUP: value})}


@dataclass(frozen=True, slots=True)
class _Pending:
    """A checkpoint that the workers are still writing."""

    state: TrainingState
    groups: SavedGroups


class RunCheckpoints:
    """The checkpoints of one run directory.

    ``found`` is the checkpoint to continue from, of this run or of ``checkpointing.resume_from_path``; None
    for a new run, which may begin with parts of the checkpoint ``begun_with``. ``warnings`` says which
    checkpoints were set aside because they were incomplete.
    """

    def __init__(
        self,
        cfg: CheckpointingConfig,
        directory: RunDirectory,
        expected_bytes: int,
        groups: Sequence[str] = (POLICY_GROUP,),
        export: PolicyExport | None = None,
    ) -> None:
        """Look for the checkpoints that earlier processes of this run left.

        ``expected_bytes`` is the size of the first checkpoint, ``groups`` are the names of the worker groups,
        and ``export`` writes the policy into every checkpoint where it is given. Raises CheckpointError when
        there are checkpoints, and none is complete.
        """
        self._cfg, self._export = cfg, export
        self.warnings: list[str] = []
        root = (
            directory.checkpoints_path if cfg.checkpoint_dir is None else Path(cfg.checkpoint_dir).absolute()
        )
        retention = Retention(cfg.keep_top_k, cfg.metric_name, cfg.higher_is_better)
        self._pending: _Pending | None = None
        self._data: dict[str, list[dict[str, Any]]] | None = None
        self._store = CheckpointStore(root, retention, self.warnings.append, expected_bytes, groups)
        self.found: Checkpoint | None = None
        if cfg.enabled and cfg.resume_if_exists:
            self._store.remove_unfinished()
            self.found = self._store.latest()
        self.begun_with: Checkpoint | None = None
        self._is_of_other_run = self.found is None and cfg.resume_from_path is not None
        if self._is_of_other_run:
            other = _of_other_run(str(cfg.resume_from_path))
            takes_all = cfg.resume_parts is ResumeParts.all
            self.found, self.begun_with = (other, None) if takes_all else (None, other)

    @property
    def last_step(self) -> int:
        """The step of the checkpoint to continue from; -1 for a new run, before the validation at step 0."""
        return -1 if self.found is None else self.found.state.step

    @property
    def wandb_run_id(self) -> str | None:
        """The Weights & Biases run id in the checkpoint to continue from; None for a new run."""
        return None if self.found is None or self._is_of_other_run else self.found.state.wandb_run_id

    def verify(self, groups: SavedGroups) -> None:
        """Have the workers hash the files that they will load, and set corrupt checkpoints aside.

        ``found`` is then the latest checkpoint with intact files, and ``warnings`` has the warnings of this
        call alone. A checkpoint of another run stays where it is. Raises CheckpointError when no checkpoint
        is left.
        """
        self.warnings.clear()
        used = self.found or self.begun_with
        if used is None:
            return

        def verify_all(checkpoint: Checkpoint) -> None:
            for name, group in groups.items():
                hashed = partial(_corrupt_files, group)
                verify_group_files(checkpoint, name, hashed)

        if self._is_of_other_run:
            verify_all(used)
        else:
            used = self.found = self._store.latest(verify_all)
        if used and not used.digests:
            self.warnings.append(
                f"checkpoint {used.path} was written without digests, so nobody can tell whether its "
                "files are what was written; the next one has them"
            )

    def meet_data(self, sources: SourceReports) -> None:
        """Compare the run's data with the data of ``found``; later checkpoints save the run's data.

        Raises CheckpointError when a training source differs. Adds a warning when held-out prompts differ, or
        when the checkpoint does not say which data it had.
        """
        self._data = saved_data(sources)
        if self.found is None:
            return
        path, saved = self.found.path, self.found.state.data
        if saved is None:
            self.warnings.append(
                f"checkpoint {path} does not say of which data it is, so nobody can tell whether this run's "
                "are the same; the next one does"
            )
            return
        if (difference := other_training_data(saved, sources)) is not None:
            raise CheckpointError(
                f"checkpoint {path} cannot be continued: its training data were others: {difference}. Give "
                "this run the data of before; a file may have another path. To train on with other data, "
                "begin a new run from its model: python scripts/convert_checkpoint.py "
                f"{quote(str(path))} --output DIR, then policy.model_name=DIR with another logger.run_name"
            )
        if (difference := other_held_out_data(saved, sources)) is not None:
            self.warnings.append(
                f"the held-out problems are not those of checkpoint {path}: {difference}. Validations from "
                "here on cannot be compared with those before, and so cannot the best checkpoints"
            )

    def resume(self, groups: SavedGroups, prompts: SavedPrompts) -> RunPosition:
        """Restore worker groups and prompt order from ``found``, and return the run's position.

        A new run gets the position of step 0, with the parts of ``begun_with`` that it takes. Raises
        CheckpointError when the configuration's data or seed differ from those of ``found``, or when a
        checkpoint cannot be loaded.
        """
        if self.found is None:
            if self.begun_with is not None:
                _load(self.begun_with, groups, dict.fromkeys(groups, 0), self._cfg.resume_parts)
            return RunPosition()
        state = self.found.state
        try:
            prompts.load_state_dict(state.sampler)
        except (KeyError, ValueError) as error:
            raise CheckpointError(f"checkpoint {self.found.path} cannot be continued: {error}") from None
        # All groups but the policy train once in every step.
        versions = {name: state.policy_version if name == POLICY_GROUP else state.step for name in groups}
        _load(self.found, groups, versions, ResumeParts.all)
        return RunPosition(state.step, state.policy_version, state.consumed_samples, state.valid_tokens)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after this step by ``checkpointing.save_period``."""
        period = self._cfg.save_period
        return self._cfg.enabled and period > 0 and step % period == 0

    def save(
        self,
        position: RunPosition,
        metrics: Mapping[str, float],
        groups: SavedGroups,
        prompts: SavedPrompts,
        wandb_run_id: str,
        export_hf: Callable[[str], None],
    ) -> None:
        """Save the state of the run after ``position.step``, which had ``metrics``.

        ``export_hf(path)`` writes the policy for transformers and vLLM.

        Does nothing when checkpoints are disabled. Completes the previous checkpoint first. With
        ``checkpointing.writing=background`` this returns while the workers still write; the checkpoint counts
        once ``settle`` or ``finish`` has completed it. Raises DiskFull when the disk is full, and
        CheckpointError when this checkpoint or the previous one cannot be written for another reason;
        complete checkpoints stay.
        """
        if not self._cfg.enabled:
            return
        self.finish()
        state = TrainingState(
            step=position.step,
            policy_version=position.policy_version,
            epoch=prompts.epoch,
            consumed_samples=position.consumed_samples,
            valid_tokens=position.valid_tokens,
            sampler=dict(prompts.state_dict()),
            metrics=dict(metrics),
            wandb_run_id=wandb_run_id,
            data=self._data,
        )
        with self._store.writing(position.step) as path, _write_errors(path):
            for name, group in groups.items():
                group.save_checkpoint(str(path / name), self._cfg.writing)
            if self._export is not None:
                self._export.write(path / HF_FOLDER, export_hf, position.step)
        self._pending = _Pending(state, groups)
        if self._cfg.writing is CheckpointWriting.blocking:
            self.finish()

    def settle(self) -> None:
        """Complete the pending checkpoint if the workers have written it, without waiting for them.

        Raises the errors of ``save``.
        """
        if self._pending is None:
            return
        with self._guarded(self._pending.state.step):
            is_written = all(one.has_written_checkpoint() for one in self._pending.groups.values())
        if is_written:
            self.finish()

    def finish(self) -> None:
        """Wait until the workers have written the pending checkpoint, if there is one, and complete it.

        Raises the errors of ``save``.
        """
        if self._pending is None:
            return
        with self._guarded(self._pending.state.step):
            digests = {
                f"{name}/{file}": digest
                for name, group in self._pending.groups.items()
                for file, digest in group.wait_for_checkpoint().items()
            }
            self._store.finish(self._pending.state, digests)
        self._pending = None

    @contextmanager
    def _guarded(self, step: int) -> Iterator[None]:
        with self._store.guarded(step), _write_errors(self._store.path(step)):
            yield


def _load(
    checkpoint: Checkpoint, groups: SavedGroups, versions: Mapping[str, int], parts: ResumeParts
) -> None:
    """Have the worker groups take these parts of a checkpoint, each as its version. Raises CheckpointError
    when it lacks a group, or cannot be loaded."""
    for name, group in groups.items():
        path = checkpoint.path_of(name)
        if not path.is_dir():
            raise CheckpointError(
                f"checkpoint {checkpoint.path} has no {name}/, since the run that wrote it had no such "
                "worker group; begin a new run with another logger.run_name"
            )
        try:
            group.load_checkpoint(str(path), versions[name], parts)
        except ActorFailed as error:
            raise CheckpointError(f"checkpoint {checkpoint.path} cannot be loaded: {error}") from error


def _of_other_run(path: str) -> Checkpoint:
    """Return the checkpoint that ``checkpointing.resume_from_path`` names. Raises CheckpointError unless it
    is whole."""
    try:
        return read_checkpoint(Path(path).absolute())
    except CheckpointError as error:
        raise CheckpointError(
            f"checkpointing.resume_from_path={path} must be a whole checkpoint, RUN_DIR/checkpoints/step_N: "
            f"{error}"
        ) from None


def continuation(cfg: Config, directory: RunDirectory) -> str:
    """Return a sentence, which starts with a full stop, on how a run with a checkpoint continues; empty for a
    run that would not look for its checkpoint."""
    if not (cfg.checkpointing.enabled and cfg.checkpointing.resume_if_exists):
        return ""
    # Without a name the same command makes a run in a directory of its own.
    named = "" if cfg.logger.run_name else f" with logger.run_name={directory.name}"
    return f". The same command{named} continues it"


def kept(cfg: Config, directory: RunDirectory, step: int) -> str:
    """Return a sentence, which starts with a full stop, on the checkpoint that was saved after ``step``."""
    return f". Step {step} is saved{continuation(cfg, directory)}"


def _corrupt_files(group: SavedGroup, path: Path, digests: Mapping[str, str]) -> Sequence[str]:
    return group.corrupt_checkpoint_files(str(path), digests)


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    """Turn ActorFailed of a worker in the block into CheckpointError that names ``path``."""
    try:
        yield
    except ActorFailed as error:
        raise CheckpointError(f"the checkpoint {path} could not be written: {error}") from error
