"""The files of a recording, a directory of recorded rollouts; rules read it before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_like.algorithms.options import StepShape

MANIFEST = "manifest.json"
# The name of the column with the experts of every token, which the rules look for.
ROUTED_EXPERTS = "routed_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingManifest:
    """The properties that all rollouts of a recording share; the file ``manifest.json``."""

    step_shape: StepShape
    # Each column as the fields of ``batch.columns.Column``; None in recordings older than this field.
    columns: Sequence[Mapping[str, Any]] | None = None
    # The tasks that the tag task of its samples names; None in recordings older than this field and tag.
    tasks: Sequence[str] | None = None


def rollout_file(step: int, first_group: int) -> str:
    """Return the file name of the rollout of ``step`` whose first group has the number ``first_group``."""
    return f"step_{step}-{first_group}.npz"


def read_manifest(directory: Path) -> RecordingManifest:
    """Read the manifest of a recording. Raises ValueError when the directory holds no recording, or when
    another version of this project wrote it."""
    path = directory / MANIFEST
    if not path.is_file():
        raise ValueError(f"{str(directory)!r} is no recording: it has no {MANIFEST}")
    try:
        return _manifest(json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, KeyError) as error:
        raise ValueError(f"{path} was written by another version of nemo_like: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged ({error}); record the rollouts anew") from None


def write_manifest(directory: Path, manifest: RecordingManifest) -> None:
    """Write the manifest into the directory of a recording."""
    described = {name: value for name, value in asdict(manifest).items() if name != "step_shape"}
    content = {**manifest.step_shape.by_key, **described}
    (directory / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def recorded_steps(directory: Path) -> set[int]:
    """Return the steps whose first rollout is in the directory."""
    found = (re.fullmatch(r"step_(\d+)-0\.npz", path.name) for path in directory.iterdir())
    return {int(match[1]) for match in found if match}


def _manifest(content: Mapping[str, Any]) -> RecordingManifest:
    shape = StepShape.read(content)
    described = {name: value for name, value in content.items() if name not in shape.by_key}
    return RecordingManifest(step_shape=shape, **described)
