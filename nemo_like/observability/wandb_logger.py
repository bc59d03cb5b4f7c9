"""Weights & Biases, on a thread of its own: nothing it does can hold up or end the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from nemo_like.config.schema import WandbConfig, WandbMode

_Task = Callable[[Any], None]


class WandbLogger:
    """Writes a run in ``wandb`` below the run directory; ``offline`` needs no network.

    Every call returns at once. Importing and starting W&B takes seconds, so both happen on the
    thread, while the run's processes start.
    """

    def __init__(self, cfg: WandbConfig, directory: Path, resolved_config: Mapping[str, Any]) -> None:
        self._cfg = cfg
        self._directory = directory
        self._config = dict(resolved_config)
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread: threading.Thread | None = None
        if cfg.mode is not WandbMode.disabled:
            self._thread = threading.Thread(target=self._run, name="wandb", daemon=True)
            self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's metrics; those of one step are joined."""
        values = dict(metrics)
        self._tasks.put(lambda run: run.log(values, step=step))

    def finish(self, *, timeout_s: float) -> str | None:
        """Write out what is left, waiting at most ``timeout_s``.

        Returns what went wrong, or None. Safe to call twice; only the first call waits.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return None
        self._tasks.put(None)
        thread.join(timeout_s)
        if thread.is_alive():
            return (
                f"W&B did not finish within {timeout_s:g} s; its files in {self._directory} may lack the end"
            )
        return None if self._error is None else f"W&B failed: {type(self._error).__name__}: {self._error}"

    def _run(self) -> None:
        try:
            import wandb

            run = self._start(wandb)
            while (task := self._tasks.get()) is not None:
                task(run)
            run.finish()
            # Ends W&B's own process; only then is everything on disk.
            wandb.teardown()
        except Exception as error:
            self._error = error

    def _start(self, wandb: ModuleType) -> Any:
        if self._cfg.mode is WandbMode.online and not wandb.login(prompt=False):
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
        return wandb.init(
            project=self._cfg.project,
            name=self._cfg.name or self._directory.name,
            dir=self._directory,
            mode=self._cfg.mode.value,
            config=self._config,
            settings=settings,
        )
