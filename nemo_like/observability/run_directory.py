"""The directory of a run: its resolved configuration, metrics, events, learning curve, logs and more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.observability.disk import write_whole


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The paths of a run's files in its directory ``path``."""

    path: Path

    @classmethod
    def create(cls, log_dir: str, run_name: str) -> RunDirectory:
        """Make ``log_dir/run_name``, or ``run_name-2``, ``-3``, ... when that exists and is not empty.

        Raises OSError when it cannot be written.
        """
        parent = Path(log_dir).absolute()
        parent.mkdir(parents=True, exist_ok=True)
        attempt = 1
        while True:
            path = parent / (run_name if attempt == 1 else f"{run_name}-{attempt}")
            if path.is_dir() and not any(path.iterdir()):
                break
            try:
                path.mkdir(parents=True)
                break
            except FileExistsError:
                attempt += 1
        (path / "logs").mkdir()
        return cls(path)

    @classmethod
    def open(cls, log_dir: str, run_name: str) -> RunDirectory:
        """Return ``log_dir/run_name``, which is made unless an earlier process of the run has made it.

        Raises OSError when it cannot be written.
        """
        path = Path(log_dir).absolute() / run_name
        (path / "logs").mkdir(parents=True, exist_ok=True)
        return cls(path)

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def config_path(self) -> Path:
        """The resolved configuration, with every default filled in."""
        return self.path / "config.yaml"

    @property
    def software_path(self) -> Path:
        """The commit, and the versions of Python and packages, with which the latest start was made."""
        return self.path / "software.json"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def events_path(self) -> Path:
        """The file of what the run told its user besides metrics, and how it ended."""
        return self.path / "events.jsonl"

    @property
    def rollout_times_path(self) -> Path:
        """The file of the times at which samples of training rollouts were requested and came."""
        return self.path / "rollout_times.jsonl"

    @property
    def wandb_run_id_path(self) -> Path:
        """The file with the run's id in W&B, with which a later process continues that W&B run."""
        return self.path / "wandb_run_id"

    @property
    def checkpoints_path(self) -> Path:
        return self.path / "checkpoints"

    @property
    def final_hf_path(self) -> Path:
        """The trained policy as a Hugging Face checkpoint."""
        return self.path / "final_hf"

    @property
    def evaluation_path(self) -> Path:
        """The results of an evaluation, with their errors."""
        return self.path / "evaluation.json"

    @property
    def learning_curve_path(self) -> Path:
        return self.path / "learning_curve.png"

    @property
    def report_path(self) -> Path:
        """The report, a page for a browser."""
        return self.path / "report.html"

    @property
    def tensorboard_path(self) -> Path:
        return self.path / "tensorboard"

    @property
    def wandb_path(self) -> Path:
        return self.path / "wandb"

    def outputs(self) -> dict[str, Path]:
        """Return the existing paths that a person may want to open, by label."""
        paths = {
            "metrics": self.metrics_path,
            "configuration": self.config_path,
            "evaluation": self.evaluation_path,
            "learning curve": self.learning_curve_path,
            "report": self.report_path,
            "checkpoints": self.checkpoints_path,
            "trained model": self.path / "final_hf",
            "rollouts as text": self.path / "rollouts",
            "recorded rollouts": self.path / "recorded",
            "profiles": self.path / "profiles",
            "TensorBoard": self.tensorboard_path,
            "logs": self.logs_path,
        }
        traces = sorted(self.path.glob("trace_step_*.json"))
        more = {f"trace of step {path.stem.rpartition('_')[2]}": path for path in traces}
        return {label: path for label, path in (paths | more).items() if path.exists()}

    def trace_path(self, step: int) -> Path:
        """Return the file of a step's time line, for chrome://tracing or ui.perfetto.dev."""
        return self.path / f"trace_step_{step}.json"

    def profile_path(self, step: int, actor: str) -> Path:
        """Return the file of torch's profile of the process ``actor`` over a step."""
        return self.path / "profiles" / f"step_{step}" / f"{actor}.json.gz"

    @property
    def logs_path(self) -> Path:
        return self.path / "logs"

    def log_path(self, actor: str) -> str:
        """Return the file to which the process ``actor`` writes its output; "/" in the name becomes "-"."""
        return str(self.logs_path / f"{actor.replace('/', '-')}.log")

    def write_config(self, resolved_yaml: str) -> None:
        write_whole(self.config_path, resolved_yaml.encode(), "the resolved configuration")

    def write_software(self, software: Mapping[str, Any]) -> None:
        write_whole(self.software_path, json.dumps(software, indent=1).encode(), "the run's software")
