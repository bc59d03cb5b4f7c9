"""Writes training rollouts to files, and reads them, so that another run can train from them.

    recorded/manifest.json        how many prompts and samples a rollout has, and which columns
    recorded/step_12-0.npz        one rollout: columns as they are stored, lengths, chunk sizes, tags, metrics
    recorded/step_12-128.npz      its refill by dynamic sampling, whose first group is number 128

A rollout is recorded as it was put, before rewards are scaled or groups dropped: a replay may use another
estimator, another loss or another parallel layout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from nemo_like.batch.columns import Column
from nemo_like.batch.recordings import RecordingManifest, read_manifest, rollout_file, write_manifest
from nemo_like.batch.tags import IS_JUDGED, SAMPLE_MASK
from nemo_like.data_plane import codec
from nemo_like.observability.disk import write_whole
from nemo_like.observability.metrics import Metric, Reduction
from nemo_like.rollout.flatten import FlatBatch
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.rollout_columns import recorded_columns

# Entries of a file that are not columns.
_DESCRIPTION, _LENGTHS, _CHUNK_SIZES = "description.json", "lengths", "chunk_sizes"
_COLUMN_PREFIX = "column/"


@dataclass(frozen=True, slots=True)
class RecordedRollout:
    """A rollout from a file: its columns and tags, and its metrics."""

    flat: FlatBatch
    metrics: dict[str, Metric]


class RolloutRecorder:
    """Writes the training rollouts of a run into a directory, which it makes."""

    def __init__(self, directory: Path, manifest: RecordingManifest) -> None:
        self._directory = directory
        self._columns = {column.name: column for column in recorded_columns(manifest)}
        directory.mkdir(parents=True, exist_ok=True)
        write_manifest(directory, manifest)

    def write(self, prompts: PromptBatch, flat: FlatBatch, metrics: Mapping[str, Metric]) -> None:
        """Write the rollout of ``prompts``; the file gets its final name only when it is complete."""
        description = {
            "tags": {name: list(values) for name, values in flat.tags.items()},
            "metrics": {
                name: [metric.total, metric.weight, metric.reduction.value]
                for name, metric in metrics.items()
            },
        }
        entries: dict[str, Any] = {
            _COLUMN_PREFIX + name: codec.whole_to_wire(
                self._columns[name],
                values,
                lengths=flat.lengths,
                num_prompts=len(flat.chunk_sizes),
                partition=f"step {prompts.step}",
            )
            for name, values in flat.columns.items()
        }
        entries[_LENGTHS] = np.asarray(flat.lengths, np.int64)
        entries[_CHUNK_SIZES] = np.asarray(flat.chunk_sizes, np.int64)
        entries[_DESCRIPTION] = np.frombuffer(json.dumps(description).encode(), np.uint8)
        path = self._directory / rollout_file(prompts.step, prompts.first_group)
        contents = BytesIO()
        np.savez(contents, allow_pickle=False, **entries)
        write_whole(path, contents.getbuffer(), f"the recording of step {prompts.step}")


def read_step(directory: Path, step: int) -> FlatBatch:
    """Return the first rollout that was recorded for a step, with all of its columns.

    Raises ValueError when there is none.
    """
    manifest = read_manifest(directory)
    prompts = PromptBatch(
        mode=RolloutMode.training,
        step=step,
        policy_version=step - 1,
        indices=tuple(range(manifest.step_shape.num_prompts)),
        num_generations=manifest.step_shape.num_generations,
    )
    return read_rollout(directory, recorded_columns(manifest), prompts).flat


def read_rollout(directory: Path, columns: Sequence[Column], prompts: PromptBatch) -> RecordedRollout:
    """Read the rollout that was recorded for this step and first group, with these columns.

    Raises ValueError when there is none, when it lacks a column, or when its numbers of groups or samples
    differ from those of ``prompts``.
    """
    path = directory / rollout_file(prompts.step, prompts.first_group)
    if not path.is_file():
        raise ValueError(
            f"rollout.replay={directory} has no {path.name}: the recorded run made no such rollout "
            f"for step {prompts.step}"
        )
    with np.load(path, allow_pickle=False) as entries:
        missing = [column.name for column in columns if _COLUMN_PREFIX + column.name not in entries.files]
        if missing:
            raise ValueError(
                f"{path} has no column {missing[0]!r}: it was recorded before the run brought one; replay "
                "the steps after it, or record again"
            )
        description: dict[str, Any] = json.loads(entries[_DESCRIPTION].tobytes())
        flat = FlatBatch(
            columns={
                column.name: codec.whole_from_wire(column, entries[_COLUMN_PREFIX + column.name])
                for column in columns
            },
            lengths=entries[_LENGTHS].tolist(),
            chunk_sizes=entries[_CHUNK_SIZES].tolist(),
            tags=_declared(description["tags"]),
        )
    if flat.chunk_sizes != [prompts.num_generations] * len(prompts):
        raise ValueError(
            f"{path} holds {len(flat.chunk_sizes)} groups of {flat.chunk_sizes[0]}, but this run asks for "
            f"{len(prompts)} groups of {prompts.num_generations}"
        )
    return RecordedRollout(
        flat,
        {
            name: Metric(total, weight, Reduction(reduction))
            for name, (total, weight, reduction) in description["metrics"].items()
        },
    )


def _declared(tags: dict[str, Any]) -> dict[str, Any]:
    """Return a recording's tags under their present names.

    Recordings older than the tag is_judged have sample_mask instead, with the same values: no stage had
    masked a judged sample yet.
    """
    if SAMPLE_MASK.name not in tags:
        return tags
    mask = tags.pop(SAMPLE_MASK.name)
    return {**tags, IS_JUDGED.name: [*map(bool, mask)]}
