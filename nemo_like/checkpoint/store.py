"""A directory of whole-run checkpoints: written aside, renamed when whole, pruned to the best and the latest.

checkpoints/
  step_20/                 exists only when everything in it is on disk
    training_state.json    where the run stood
    policy/                weights, optimizer, schedule: the training backend's own format
    manifest.json          every other file with its size
  tmp_step_30/             being written, or left by a run that was killed
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from nemo_like.checkpoint.state import TrainingState

STATE_FILE = "training_state.json"
MANIFEST_FILE = "manifest.json"
POLICY_DIRECTORY = "policy"
_STEP = re.compile(r"step_(\d+)")
_UNFINISHED_PREFIX = "tmp_"
_FULL_BYTES = 1 << 20  # with less than this free, whatever went wrong while writing was the disk


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written or read; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class Retention:
    """Kept are the latest checkpoint and the ``keep_top_k`` best by ``metric``; null keeps all."""

    keep_top_k: int | None
    metric: str | None  # name in metrics.jsonl; null ranks by step, so that the latest are kept
    is_higher_better: bool


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One that is whole."""

    path: Path
    state: TrainingState

    @property
    def policy_path(self) -> Path:
        return self.path / POLICY_DIRECTORY


class CheckpointStore:
    """``warn`` gets a sentence for every checkpoint that is passed over."""

    def __init__(self, root: Path, retention: Retention, warn: Callable[[str], None]) -> None:
        self._root, self._retention, self._warn = root, retention, warn

    @contextmanager
    def writing(self, step: int) -> Iterator[Path]:
        """A directory for the policy's part of the checkpoint of ``step``; ``finish`` it inside the block, or
        later, then ``guarded``.

        When the block raises, what was written of this checkpoint is removed and the others are untouched.
        Raises CheckpointError, with the space that is free and needed, when the disk is full.
        """
        shutil.rmtree(self._unfinished(step), ignore_errors=True)
        self._check_space(step)
        with self.guarded(step):
            policy = self._unfinished(step) / POLICY_DIRECTORY
            policy.mkdir(parents=True)
            yield policy

    @contextmanager
    def guarded(self, step: int) -> Iterator[None]:
        """Around what is done with an unfinished checkpoint after ``writing``; raises likewise."""
        unfinished = self._unfinished(step)
        try:
            yield
        except BaseException as error:
            is_full = self._free_bytes() < _FULL_BYTES  # read before the space comes back
            shutil.rmtree(unfinished, ignore_errors=True)
            if is_full and isinstance(error, Exception):
                raise CheckpointError(self._disk_full(step, self._free_bytes(), needed=None)) from error
            raise

    def finish(self, state: TrainingState) -> Checkpoint:
        """Make the checkpoint being written whole and visible, then drop those no longer kept."""
        unfinished = self._unfinished(state.step)
        (unfinished / STATE_FILE).write_text(state.to_json(), encoding="utf-8")
        sizes = _file_sizes(unfinished)
        (unfinished / MANIFEST_FILE).write_text(json.dumps(sizes, indent=1, sort_keys=True), encoding="utf-8")
        for name in (*sizes, MANIFEST_FILE):
            _flush_to_disk(unfinished / name)
        path = self.path(state.step)
        if path.exists():  # written by a run that was resumed from an earlier step
            shutil.rmtree(path)
        unfinished.rename(path)
        _flush_to_disk(self._root)
        checkpoint = Checkpoint(path, state)
        self._prune(checkpoint)
        return checkpoint

    def path(self, step: int) -> Path:
        """Where the checkpoint of ``step`` is, once it is whole."""
        return self._root / f"step_{step}"

    def latest(self) -> Checkpoint | None:
        """The newest whole checkpoint; broken ones are passed over with a warning."""
        for path in reversed(self._paths()):
            try:
                return read_checkpoint(path)
            except CheckpointError as error:
                self._warn(f"{error}; taking the one before it")
        return None

    def remove_unfinished(self) -> None:
        """What a run that was killed while saving left behind."""
        for path in self._root.glob(f"{_UNFINISHED_PREFIX}step_*"):
            shutil.rmtree(path, ignore_errors=True)

    def _unfinished(self, step: int) -> Path:
        return self._root / f"{_UNFINISHED_PREFIX}step_{step}"

    def _paths(self) -> list[Path]:
        """By step."""
        if not self._root.is_dir():
            return []
        found = [
            (int(match[1]), path) for path in self._root.iterdir() if (match := _STEP.fullmatch(path.name))
        ]
        return [path for _, path in sorted(found)]

    def _prune(self, latest: Checkpoint) -> None:
        """Broken ones stay for a person to look at."""
        if self._retention.keep_top_k is None:
            return
        whole = [checkpoint for path in self._paths() if (checkpoint := self._if_whole(path))]
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
        """Higher is better; ties keep the newer. A checkpoint without the metric is the worst."""
        state, metric = checkpoint.state, self._retention.metric
        if metric is None:
            return 0.0, state.step
        value = state.metrics.get(metric, math.nan)
        if math.isnan(value):
            return -math.inf, state.step
        return (value if self._retention.is_higher_better else -value), state.step

    def _check_space(self, step: int) -> None:
        """A checkpoint is as large as the one before it."""
        self._root.mkdir(parents=True, exist_ok=True)
        paths = self._paths()
        needed = sum(_file_sizes(paths[-1]).values()) if paths else 0
        if (free := self._free_bytes()) < needed:
            raise CheckpointError(self._disk_full(step, free, needed))

    def _free_bytes(self) -> int:
        return shutil.disk_usage(self._root).free

    def _disk_full(self, step: int, free: int, needed: int | None) -> str:
        size = "" if needed is None else f", and it needs {needed / 2**30:.2f} GiB"
        return (
            f"no space for the checkpoint of step {step}: {free / 2**30:.2f} GiB are free in {self._root}"
            f"{size}. "
            "The checkpoints before it are whole. Free some space, keep fewer (checkpointing.keep_top_k) or "
            "save elsewhere (checkpointing.checkpoint_dir), then run again: it continues from the last one"
        )


def read_checkpoint(path: Path) -> Checkpoint:
    """Raises CheckpointError when it is not whole."""
    try:
        promised = json.loads((path / MANIFEST_FILE).read_text(encoding="utf-8"))
        state = TrainingState.from_json((path / STATE_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint {path} is broken: {error}") from None
    there = _file_sizes(path)
    broken = sorted(name for name, size in promised.items() if there.get(name) != size)
    if broken:
        raise CheckpointError(
            f"checkpoint {path} is broken: {broken[0]} has {there.get(broken[0], 'no')} bytes instead of "
            f"{promised[broken[0]]}" + (f", and {len(broken) - 1} more files" if broken[1:] else "")
        )
    return Checkpoint(path, state)


def _file_sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file but the manifest, by path inside the directory."""
    files = (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != MANIFEST_FILE)
    return {str(path.relative_to(directory)): path.stat().st_size for path in files}


def _flush_to_disk(path: Path) -> None:
    """So that a rename never outlives what it names, whatever happens to the machine."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
