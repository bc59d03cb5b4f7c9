"""Finds the checkpoint of ``scripts/evaluate.py --checkpoint``: a Hugging Face directory, run, or step."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from nemo_like.checkpoint.store import checkpoint_paths
from nemo_like.config.resolved import read_resolved
from nemo_like.models.hub_models import is_hub_name

_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True)
class EvaluatedCheckpoint:
    """A checkpoint to evaluate. When ``source`` is not None, it must first be converted to ``model``."""

    model: Path  # a Hugging Face directory, or a name on the hub
    step: int  # of the run that trained it; 0 where that is unknown
    source: Path | None = None


def evaluated_checkpoint(path: Path) -> EvaluatedCheckpoint:
    """Find the checkpoint in ``path``.

    In a run directory it is ``final_hf``, or the latest saved checkpoint if that is of a later step, which is
    then converted to RUN_DIR/hf_step_N once. Raises ValueError when there is none, saying what is there. What
    may be a name on the Hugging Face hub is not looked for.
    """
    if is_hub_name(str(path)):
        return EvaluatedCheckpoint(path, 0)
    if (path / "config.json").is_file():
        return EvaluatedCheckpoint(path, _exported_step(path) or 0)
    if found := _STEP.fullmatch(path.name):
        evaluated = _converted(path.absolute().parents[1], int(found[1]), path)
        if evaluated.source is not None and not path.is_dir():
            there = ", ".join(one.name for one in checkpoint_paths(path.parent)) or "no step_N"
            raise ValueError(f"--checkpoint {path} is no directory; {path.parent} has {there}")
        return evaluated
    if not (path / "config.yaml").is_file():
        raise ValueError(
            f"--checkpoint {path} is neither a Hugging Face checkpoint (config.json) nor a run directory "
            f"(config.yaml) nor a run's step_N{'' if path.is_dir() else '; it is no directory'}"
        )
    exported = path / "final_hf"
    export_step = _exported_step(exported)
    saved = {int(found[1]): one for one in _saved(path) if (found := _STEP.fullmatch(one.name))}
    latest = max(saved, default=None)
    if export_step is not None and (latest is None or latest <= export_step):
        return EvaluatedCheckpoint(exported, export_step)
    if latest is None:
        raise ValueError(
            f"--checkpoint {path}: the run left neither final_hf nor a checkpoint; it needs "
            "checkpointing.export_final_hf=true or checkpointing.enabled=true"
        )
    return _converted(path, latest, saved[latest])


def _converted(run: Path, step: int, source: Path) -> EvaluatedCheckpoint:
    model = run / f"hf_step_{step}"
    return EvaluatedCheckpoint(model, step, None if (model / "config.json").is_file() else source)


def _saved(run: Path) -> list[Path]:
    """Return the checkpoints that a run saved, in the directory that its configuration names.

    Raises ValueError when the configuration cannot be read.
    """
    directory = read_resolved(run / "config.yaml", "checkpointing")["checkpointing"].get("checkpoint_dir")
    return [*(run / "checkpoints" if directory is None else Path(directory)).glob("step_*")]


def _exported_step(model: Path) -> int | None:
    """Return the step of the model that a run exported to ``model``; None when its run.json names none."""
    try:
        return int(json.loads((model / "run.json").read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
