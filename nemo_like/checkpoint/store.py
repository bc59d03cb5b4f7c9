"""The directory of a run's checkpoints.

A checkpoint is written under another name and renamed when it is whole. Then all but the best and the latest
are removed.

checkpoints/
  step_20/                 exists only when everything in it is on disk
    training_state.json    where the run stood
    policy/                weights, optimizer, schedule: the training backend's own format
    value/                 the same of the critic, where there is one
    manifest.json          every other file with its size and SHA-256, but for those in hf/
    hf/                    the policy for transformers and vLLM, with checkpointing.export_hf; no run reads it
  step_10.corrupt/         set aside, because it is not what was written; for a person to look at or remove
  tmp_step_30/             unfinished: being written, or left by a run that was killed
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_like.checkpoint.digests import differing_files, file_digest
from nemo_like.checkpoint.state import TrainingState
from nemo_like.observability.disk import check_space, removed_on_error, space_for

STATE_FILE = "training_state.json"
MANIFEST_FILE = "manifest.json"
# The worker groups by name; every run that trains has a policy.
POLICY_GROUP, VALUE_GROUP = "policy", "value"
HF_FOLDER = "hf"
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED_PREFIX = "tmp_"
_CORRUPT_SUFFIX = ".corrupt"
_DISK_FULL_REMEDY = (
    "The checkpoints before it are whole. Free some space, keep fewer (checkpointing.keep_top_k) or save "
    "elsewhere (checkpointing.checkpoint_dir), then run again: it continues from the last one"
)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Which checkpoints are kept: the latest, and the ``keep_top_k`` best by ``metric``."""

    keep_top_k: int | None  # None keeps all
    metric: str | None  # name in metrics.jsonl; None ranks by step, so that the latest are kept
    is_higher_better: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint: its files are all there and have the sizes that they were written with."""

    path: Path
    state: TrainingState
    digests: Mapping[str, str]  # SHA-256 of the groups' files by path in it; empty if the manifest has none

    def path_of(self, group: str) -> Path:
        """Return the directory of a worker group's files."""
        return self.path / group

    def digests_of(self, group: str) -> dict[str, str]:
        """Return the SHA-256 of a worker group's files by name."""
        parts = ((name.partition("/"), digest) for name, digest in self.digests.items())
        return {name: digest for (directory, _, name), digest in parts if directory == group}


# Given a directory and digests by file name, returns the names of the files that are not what they say.
DifferingFiles = Callable[[Path, Mapping[str, str]], Sequence[str]]


class CheckpointStore:
    """Writes, finds, reads and removes the checkpoints of one run, in the directory ``root``.

    ``groups`` are the worker groups whose files a checkpoint has, each in a directory of its name. ``warn``
    is called with a sentence for every checkpoint that is set aside. ``expected_bytes`` is how large the
    first checkpoint will be; each later one is expected to be as large as its predecessor.
    """

    def __init__(
        self,
        root: Path,
        retention: Retention,
        warn: Callable[[str], None],
        expected_bytes: int,
        groups: Sequence[str] = (POLICY_GROUP,),
    ) -> None:
        self._root, self._retention, self._warn = root, retention, warn
        self._expected_bytes, self._groups = expected_bytes, tuple(groups)

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """Begin the checkpoint of ``step``, and yield the directory with an empty one for each group's files.

        The caller completes the checkpoint with ``finish``: inside the block, or later, inside ``guarded``.
        When the block raises, the files of this checkpoint are removed; other checkpoints are untouched.
        Raises DiskFull when the disk is full, or has less space free than the checkpoint needs.
        """
        shutil.rmtree(self._unfinished(step), ignore_errors=True)
        check_space(f"the checkpoint of step {step}", self._root, self._needed_bytes(), _DISK_FULL_REMEDY)
        with self.guarded(step):
            for group in self._groups:
                (self._unfinished(step) / group).mkdir(parents=True)
            yield self._unfinished(step)

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Guard a block that goes on with an unfinished checkpoint after ``writing`` has ended.

        When the block raises, the files of this checkpoint are removed. Raises DiskFull in place of the
        block's error when the disk is full.
        """
        name = f"the checkpoint of step {step}"
        with (
            removed_on_error(self._unfinished(step)),
            space_for(name, self._root, self._needed_bytes(), _DISK_FULL_REMEDY),
        ):
            yield

    def finish(self, state: TrainingState, group_digests: Mapping[str, str]) -> Checkpoint:
        """Complete the checkpoint and make it visible, then remove checkpoints that are no longer kept.

        ``group_digests`` are the SHA-256 of the groups' files, by their path inside the checkpoint, which the
        workers computed that wrote these files. Raises CheckpointError when the directory, as this process
        sees it, has other files.
        """
        unfinished = self._unfinished(state.step)
        self._check_written(unfinished, group_digests)
        (unfinished / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
        digests = {**group_digests, STATE_FILE: file_digest(unfinished / STATE_FILE)}
        sizes = _file_sizes(unfinished)
        # A run can go on without hf/, so whoever needs its space may remove it.
        needed = {name: size for name, size in sizes.items() if not name.startswith(f"{HF_FOLDER}/")}
        manifest = {name: {"bytes": size, "sha256": digests[name]} for name, size in needed.items()}
        (unfinished / MANIFEST_FILE).write_text(json.dumps(manifest, indent=1, sort_keys=True), "utf-8")
        for name in (*sizes, MANIFEST_FILE):
            _flush_to_disk(unfinished / name)
        path = self.path(state.step)
        if path.exists():  # written by a run that was resumed from an earlier step
            shutil.rmtree(path)
        unfinished.rename(path)
        _flush_to_disk(self._root)
        checkpoint = Checkpoint(path, state, group_digests)
        self._prune(checkpoint)
        return checkpoint

    def path(self, step: int) -> Path:
        """Return where the checkpoint of ``step`` is, once it is whole."""
        return self._root / f"step_{step}"

    def latest(self, verify: Callable[[Checkpoint], None] = lambda checkpoint: None) -> Checkpoint | None:
        """Return the newest whole checkpoint, or None when there is no checkpoint at all.

        A checkpoint that is not whole, or for which ``verify`` raises CheckpointError, is set aside under
        another name, and the one before it is tried; ``warn`` gets a sentence for each. Raises
        CheckpointError when no checkpoint is whole and at least one was set aside, now or by an earlier
        process.
        """
        reasons = []
        for path in reversed(checkpoint_paths(self._root)):
            try:
                checkpoint = read_checkpoint(path)
                verify(checkpoint)
            except CheckpointError as error:
                reasons.append(f"{error}. It is set aside as {self._set_aside(path).name}")
                continue
            for reason in reasons:
                self._warn(f"{reason}; what came after step {checkpoint.state.step} is lost and done again")
            return checkpoint
        if aside := sorted(path.name for path in self._root.glob(f"step_*{_CORRUPT_SUFFIX}*")):
            raise CheckpointError(
                ". ".join([*reasons, f"No checkpoint in {self._root} is whole: there is {', '.join(aside)}"])
                + ". Restore one of them under the name step_N, or begin anew: remove them, or give another "
                "logger.run_name"
            )
        return None

    def remove_unfinished(self) -> None:
        """Remove the unfinished checkpoints that a run which was killed while saving left behind."""
        for path in self._root.glob(f"{_UNFINISHED_PREFIX}step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _check_written(self, directory: Path, group_digests: Mapping[str, str]) -> None:
        """Raise CheckpointError unless this process sees exactly the files that the workers wrote."""
        seen = {f"{group}/{path.name}" for group in self._groups for path in (directory / group).iterdir()}
        differing = seen ^ group_digests.keys()
        if differing:
            raise CheckpointError(
                f"the workers and the driver see different files in {directory}: "
                f"{', '.join(sorted(differing))}. Every node must share the disk that "
                "checkpointing.checkpoint_dir, or logger.log_dir, is on"
            )

    def _set_aside(self, path: Path) -> Path:
        """Rename a broken checkpoint, so that nothing reads or replaces it, and return its new path."""
        aside, attempt = path.with_name(path.name + _CORRUPT_SUFFIX), 1
        while aside.exists():
            attempt += 1
            aside = path.with_name(f"{path.name}{_CORRUPT_SUFFIX}-{attempt}")
        return path.rename(aside)

    def _unfinished(self, step: int) -> Path:
        return self._root / f"{_UNFINISHED_PREFIX}step_{step}"

    def _prune(self, latest: Checkpoint) -> None:
        """Remove the checkpoints that are no longer kept. Broken ones stay, for a person to look at."""
        if self._retention.keep_top_k is None:
            return
        whole = [checkpoint for path in checkpoint_paths(self._root) if (checkpoint := self._if_whole(path))]
        best = sorted(whole, key=self._rank, reverse=True)[: self._retention.keep_top_k]
        kept = {latest.path, *(checkpoint.path for checkpoint in best)}
        for checkpoint in whole:
            if checkpoint.path not in kept:
                shutil.rmtree(checkpoint.path, ignore_errors=True)

    def _if_whole(self, path: Path) -> Checkpoint | None:
        try:
            return read_checkpoint(path)
        except CheckpointError:
            return None

    def _rank(self, checkpoint: Checkpoint) -> tuple[float, int]:
        """Return a sort key that is higher for a better checkpoint; of equally good ones the newer is better.

        A checkpoint without the metric is the worst.
        """
        state, metric = checkpoint.state, self._retention.metric
        if metric is None:
            return 0.0, state.step
        value = state.metrics.get(metric, math.nan)
        if math.isnan(value):
            return -math.inf, state.step
        return (value if self._retention.is_higher_better else -value), state.step

    def _needed_bytes(self) -> int:
        """Estimate the bytes of the next checkpoint: the size of the newest, or ``expected_bytes`` without
        one."""
        paths = checkpoint_paths(self._root)
        return sum(_file_sizes(paths[-1]).values()) if paths else self._expected_bytes


def checkpoint_paths(root: Path) -> list[Path]:
    """Return the path of every ``step_N`` in ``root``, whole or not, in the order of steps."""
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def read_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint's manifest and training state, and check the sizes of all files.

    The groups' files are not read. Raises CheckpointError when a file is missing or has another size than it
    was written with, or when the training state has changed since it was written.
    """
    try:
        listed = _read_manifest(path / MANIFEST_FILE)
        state = TrainingState.from_json((path / STATE_FILE).read_text(encoding="utf-8"))
        state_digest = file_digest(path / STATE_FILE)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: {error}") from None
    there = _file_sizes(path)
    broken = sorted(name for name, entry in listed.items() if there.get(name) != entry.num_bytes)
    if broken:
        name = broken[0]
        raise CheckpointError(
            f"checkpoint {path} is broken: {name} has {there.get(name, 'no')} bytes instead of "
            f"{listed[name].num_bytes}" + (f", and {len(broken) - 1} more files" if broken[1:] else "")
        )
    digests = {name: entry.sha256 for name, entry in listed.items() if entry.sha256 is not None}
    _raise_if_corrupt(path, [STATE_FILE] if digests.pop(STATE_FILE, state_digest) != state_digest else [])
    return Checkpoint(path, state, digests)


def verify_group_files(
    checkpoint: Checkpoint, group: str = POLICY_GROUP, differing_files: DifferingFiles = differing_files
) -> None:
    """Raise CheckpointError when a file of a worker group has changed since it was written.

    ``differing_files`` hashes the files and says which differ: in this process, or on the group's workers.
    Files without a digest are not checked.
    """
    corrupt = differing_files(checkpoint.path_of(group), checkpoint.digests_of(group))
    _raise_if_corrupt(checkpoint.path, [f"{group}/{name}" for name in corrupt])


@dataclass(frozen=True, slots=True)
class _ManifestEntry:
    """What the manifest says of one file: its size, and its digest unless the manifest is an older one."""

    num_bytes: int
    sha256: str | None


def _read_manifest(path: Path) -> dict[str, _ManifestEntry]:
    """Return the manifest's entries by file name.

    Raises OSError when it cannot be read, and ValueError when it has another format.
    """
    entries = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(entries, dict) or STATE_FILE not in entries:
        raise ValueError(f"{path.name} does not list {STATE_FILE}")
    if all(type(entry) is int for entry in entries.values()):
        return {name: _ManifestEntry(size, None) for name, size in entries.items()}
    try:
        return {name: _ManifestEntry(entry["bytes"], entry["sha256"]) for name, entry in entries.items()}
    except (KeyError, TypeError):
        raise ValueError(f"{path.name} does not give size and sha256 of every file") from None


def _raise_if_corrupt(path: Path, names: Sequence[str]) -> None:
    if names:
        verb = "is" if len(names) == 1 else "are"
        raise CheckpointError(
            f"checkpoint {path} is corrupt: {', '.join(sorted(names))} {verb} not what was written (SHA-256)"
        )


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return the size in bytes of every file but the manifest, by path inside the directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _flush_to_disk(path: Path) -> None:
    """Flush a file or directory, so that even after a power failure no renamed checkpoint lacks contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
