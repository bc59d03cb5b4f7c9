"""Weights & Biases; ``offline`` needs no network."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from nemo_like.config.schema import WandbConfig, WandbMode
from nemo_like.observability.summary import SampleAnswer


def new_run_id() -> str:
    """An id that W&B accepts for a new run."""
    return uuid.uuid4().hex[:8]


class WandbRecorder:
    """A run in ``wandb`` below the run directory."""

    def __init__(
        self, cfg: WandbConfig, directory: Path, resolved_config: Mapping[str, Any], run_id: str
    ) -> None:
        """Continues the run that has ``run_id``, if there is one. Raises PermissionError without a key."""
        import wandb

        self._wandb = wandb
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
            # The start of system statistics costs a process and a second of CPU.
            x_disable_stats=True,
            x_disable_machine_info=True,
        )
        self._run = wandb.init(
            id=run_id,
            # Offline files meet the run they continue when they are uploaded, by the id alone.
            resume="allow" if cfg.mode is WandbMode.online else None,
            project=cfg.project,
            name=cfg.name or directory.name,
            dir=directory,
            mode=cfg.mode.value,
            config=dict(resolved_config),
            settings=settings,
        )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """As a table."""
        columns = [field.name for field in fields(SampleAnswer)]
        rows = [[getattr(answer, name) for name in columns] for answer in answers]
        table = self._wandb.Table(columns=columns, data=rows)
        self._run.log({"validation/answers": table}, step=step)

    def close(self) -> None:
        self._run.finish()
        # Ends W&B's own process; only then is everything on disk.
        self._wandb.teardown()
