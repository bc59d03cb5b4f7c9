"""Records a run in Weights & Biases (W&B). Mode ``offline`` needs no network."""

from __future__ import annotations

import logging
import os
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil

from nemo_like.observability.options import WandbConfig, WandbMode
from nemo_like.observability.summary import SampleAnswer


def new_run_id() -> str:
    """Return an id that W&B accepts for a new run."""
    return uuid.uuid4().hex[:8]


def end_processes() -> None:
    """Kill the W&B processes that this process started; a call that waits for one then ends with an error."""
    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("wandb"):
                process.kill()


class WandbRecorder:
    """A ``Recorder`` that writes a W&B run, with its files in ``wandb`` below the run directory."""

    def __init__(
        self, cfg: WandbConfig, directory: Path, resolved_config: Mapping[str, Any], run_id: str
    ) -> None:
        """Start a W&B run, or continue the one that has ``run_id``.

        Raises PermissionError without an API key.
        """
        import wandb

        # W&B logs into the run directory. On a full disk each of its lines would print a traceback.
        logging.raiseExceptions = False
        self._wandb = wandb
        self._variables = _set_absent(
            # W&B's own log of its processes, of which the run's directory gets a copy.
            WANDB_CACHE_DIR=tempfile.gettempdir(),
            # What uploads of an offline run need besides its files.
            WANDB_DATA_DIR=str(directory / "wandb"),
        )
        if cfg.mode is WandbMode.online and not wandb.login(prompt=False):
            raise PermissionError(
                "no API key for logger.wandb.mode=online; run `wandb login` once, or set mode=offline"
            )
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_git=True,
            disable_code=True,
            disable_job_creation=True,
            x_disable_stats=not cfg.system_metrics,
            x_disable_machine_info=not cfg.system_metrics,
        )
        try:
            self._run = wandb.init(
                id=run_id,
                # Offline, the id is enough: the files join the run that they continue when they are uploaded.
                resume="allow" if cfg.mode is WandbMode.online else None,
                project=cfg.project,
                name=cfg.name or directory.name,
                entity=cfg.entity,
                group=cfg.group,
                job_type=cfg.job_type,
                tags=cfg.tags,
                notes=cfg.notes,
                dir=directory,
                mode=cfg.mode.value,
                config=dict(resolved_config),
                settings=settings,
            )
        except Exception:
            self._end_service()
            raise

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._is_open(step):
            self._run.log(dict(metrics), step=step)

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Record the answers as a table."""
        if not self._is_open(step):
            return
        columns = [field.name for field in fields(SampleAnswer)]
        rows = [[getattr(answer, name) for name in columns] for answer in answers]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"validation/answers": table}, step=step)
        # Besides what it uploads, W&B keeps each table among the temporary files until this process ends.
        target = table._artifact_target
        if target is not None and (copy := target.artifact._tmp_dir) is not None:
            copy.cleanup()

    def _is_open(self, step: int) -> bool:
        """Return whether W&B still takes values of this step.

        A process that was killed may have logged steps after the checkpoint that this one continues.
        """
        return step >= int(self._run.step)

    def close(self) -> None:
        try:
            self._run.finish()
        finally:
            self._end_service()

    def _end_service(self) -> None:
        """Stop W&B's own process; only then is everything on disk.

        Raises OSError when that process is gone already. Without this call, W&B would notice that when this
        process exits, and print a traceback.
        """
        try:
            self._wandb.teardown()
        finally:
            for name in self._variables:
                os.environ.pop(name, None)


def _set_absent(**variables: str) -> list[str]:
    """Set those environment variables that are not set, and return their names."""
    absent = [name for name in variables if name not in os.environ]
    os.environ.update({name: variables[name] for name in absent})
    return absent
