"""The keys of what is shown and written of a run, ``logger``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated
from urllib.parse import urlparse

from nemo_like.config.keys import Key


class WandbMode(Enum):
    online = "online"
    offline = "offline"
    disabled = "disabled"


class ConsoleMode(Enum):
    """How progress is shown. ``auto`` is ``live`` on a terminal and ``plain`` elsewhere."""

    auto = "auto"
    live = "live"
    plain = "plain"


@dataclass(kw_only=True, slots=True)
class WandbConfig:
    mode: Annotated[
        WandbMode,
        Key("online (needs an API key), offline (files in the run directory) or disabled", WandbMode.offline),
    ]
    project: Annotated[str, Key("in which the run is shown", "nemo_like")]
    name: Annotated[str | None, Key("null: the name of the run directory", None)]
    entity: Annotated[
        str | None, Key("the team or user that owns the project; null: that of the API key", None)
    ]
    group: Annotated[str | None, Key("runs with the same group are shown together", None)]
    job_type: Annotated[str | None, Key("what kind of run it is within its group, for example train", None)]
    tags: Annotated[list[str], Key("e.g. [qwen3-8b, baseline]", [])]
    notes: Annotated[str | None, Key("a text about the run", None)]
    system_metrics: Annotated[
        bool, Key("W&B's own measurements of the driver's node: CPUs, memory, disk, network, GPUs", True)
    ]


@dataclass(kw_only=True, slots=True)
class TensorboardConfig:
    enabled: Annotated[bool, Key("event files in RUN_DIR/tensorboard", False)]


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    enabled: Annotated[bool, Key("needs the package: pip install mlflow", False)]
    tracking_uri: Annotated[
        str | None,
        Key("a server (http://HOST:5000), a directory (mlruns) or a database (sqlite:///mlflow.db);", None),
    ]
    experiment_name: Annotated[str, Key("null: MLFLOW_TRACKING_URI, or MLflow's default", "nemo_like")]


@dataclass(kw_only=True, slots=True)
class PrometheusConfig:
    port: Annotated[int | None, Key("e.g. 9400; null: off", None)]
    host: Annotated[
        str,
        Key(
            "of the driver's node; 0.0.0.0: all its addresses, and whoever reaches them may read", "127.0.0.1"
        ),
    ]


@dataclass(kw_only=True, slots=True)
class ProfileConfig:
    """torch's profiler, which writes RUN_DIR/profiles/step_N/PROCESS.json.gz."""

    steps: Annotated[list[int], Key("e.g. [3]", [])]
    processes: Annotated[
        list[str],
        Key("names as in RUN_DIR/processes.json: policy_worker-0, engine-1, ...", ["policy_worker*"]),
    ]


@dataclass(kw_only=True, slots=True)
class LoggerConfig:
    """What a run leaves behind, and what it shows."""

    log_dir: Annotated[str, Key("the run directories are made in it", "runs")]
    run_name: Annotated[str | None, Key("null: config name, date and time", None)]
    console: Annotated[
        ConsoleMode, Key("live on a terminal, plain lines elsewhere; or live, plain", ConsoleMode.auto)
    ]
    num_sample_answers: Annotated[int, Key("how many answers the summary shows", 4, at_least=0)]
    report: Annotated[
        bool,
        Key(
            "write RUN_DIR/report.html while the run goes on: curves, samples, stages (docs/report.md)", True
        ),
    ]
    wandb: Annotated[WandbConfig, Key("Weights & Biases")]
    tensorboard: Annotated[TensorboardConfig, Key("event files for TensorBoard")]
    mlflow: Annotated[MlflowConfig, Key("an MLflow server, or a folder")]
    prometheus: Annotated[
        PrometheusConfig, Key("http://HOST:PORT/metrics has the latest metrics, for as long as the run lasts")
    ]
    trace_steps: Annotated[
        list[int],
        Key("e.g. [3]: RUN_DIR/trace_step_3.json shows what every process did when, in ui.perfetto.dev", []),
    ]
    profile: Annotated[ProfileConfig, Key("torch's profiler")]
    nvtx_ranges: Annotated[
        bool, Key("engines and workers mark what they do for NVIDIA Nsight Systems, on GPUs", False)
    ]


def mlflow_directory(uri: str) -> Path | None:
    """Return the local directory that a tracking URI names; None when it names something else."""
    parsed = urlparse(uri)
    return Path(parsed.path).absolute() if parsed.scheme in ("", "file") else None
