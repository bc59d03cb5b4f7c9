"""One directory per run: resolved config, metrics, learning curve, logs, W&B files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names of everything a run leaves behind."""

    path: Path

    @classmethod
    def create(cls, log_dir: str, run_name: str) -> RunDirectory:
        """Make ``log_dir/run_name``, or ``run_name-2``, ``-3``, ... when that is taken.

        Raises OSError when it cannot be written.
        """
        parent = Path(log_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        attempt = 1
        while True:
            path = parent / (run_name if attempt == 1 else f"{run_name}-{attempt}")
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                attempt += 1
                continue
            (path / "logs").mkdir()
            return cls(path)

    @classmethod
    def reopen(cls, log_dir: str, run_name: str) -> RunDirectory | None:
        """The directory that a run of this name made; None when there is none."""
        path = Path(log_dir).absolute() / run_name
        if not path.is_dir():
            return None
        (path / "logs").mkdir(exist_ok=True)
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_path(self) -> Path:
        """The resolved configuration, every default filled in."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def learning_curve_path(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    def trace_path(self, step: int) -> Path:
        """The time line of a step, for chrome://tracing or ui.perfetto.dev."""
        return self.path / f"trace_step_{step}.json"

    def profile_path(self, step: int, actor: str) -> Path:
        """torch's profile of one process over a step."""
        return self.path / "profiles" / f"step_{step}" / f"{actor}.json.gz"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def log_path(self, actor: str) -> str:
        """Where a process called ``actor`` writes its output; "/" in a name becomes "-"."""
        return str(self.logs_path / f"{actor.replace('/', '-')}.log")

    def write_config(self, resolved_yaml: str) -> None:
        self.config_path.write_text(resolved_yaml, encoding="utf-8")
