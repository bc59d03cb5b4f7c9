"""Keeps metrics in MLflow: an experiment on a server, in a database or in a folder."""

from __future__ import annotations

import importlib.util
import math
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.config.secrets import as_written
from nemo_like.observability.logger_kind import LoggedRun, LoggerKind
from nemo_like.observability.summary import SampleAnswer

# How many of them one request may carry.
_MAX_METRICS, _MAX_PARAMS = 1000, 100
_SERVERS = ("http", "https")
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_OTHERS = ("databricks", "uc", "databricks-uc")
_SERVER_TIMEOUT_S = 5.0


@dataclass(kw_only=True, slots=True)
class MlflowConfig:
    enabled: Annotated[bool, Key("needs the package: pip install mlflow", False)]
    tracking_uri: Annotated[
        str | None,
        Key("a server (http://HOST:5000), a directory (mlruns) or a database (sqlite:///mlflow.db);", None),
    ]
    experiment_name: Annotated[str, Key("null: MLFLOW_TRACKING_URI, or MLflow's default", "nemo_like")]


def tracking_uri(cfg: MlflowConfig) -> str | None:
    """Return where the runs are kept; None leaves the choice to MLflow."""
    return cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")


def mlflow_directory(uri: str) -> Path | None:
    """Return the local directory that a tracking URI names; None when it names something else."""
    parsed = urlparse(uri)
    return Path(parsed.path).absolute() if parsed.scheme in ("", "file") else None


def mlflow_name(name: str, is_directory: bool) -> str:
    """Return the metric's name as MLflow accepts it, without "@" and other signs that it refuses.

    In a directory a name is the path of a file. It keeps only its first "/", so that no metric's path is the
    directory of another metric.
    """
    allowed = re.sub(r"[^\w.\- :/]", "_", name.replace("@", "_at_"))
    if not is_directory:
        return allowed
    group, slash, rest = allowed.partition("/")
    return group + slash + rest.replace("/", ".")


class MlflowRecorder:
    """A ``Recorder`` that writes a run into the experiment that the configuration names."""

    def __init__(self, cfg: MlflowConfig, run_name: str, resolved_config: Mapping[str, Any]) -> None:
        uri = tracking_uri(cfg)
        self._is_directory = uri is None or mlflow_directory(uri) is not None
        if self._is_directory:
            # Newer versions of MLflow write into a directory only where this variable says so.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client = MlflowClient(tracking_uri=cfg.tracking_uri)
        experiment = self._client.get_experiment_by_name(cfg.experiment_name)
        experiment_id = (
            experiment.experiment_id if experiment else self._client.create_experiment(cfg.experiment_name)
        )
        self._run_id = self._client.create_run(experiment_id, run_name=run_name).info.run_id
        params = [Param(key, str(value)) for key, value in _leaves(resolved_config)]
        for start in range(0, len(params), _MAX_PARAMS):
            self._client.log_batch(self._run_id, params=params[start : start + _MAX_PARAMS])

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now_ms = time.time_ns() // 1_000_000
        # A server's database may not take values that are not finite.
        values = [
            self._metric(mlflow_name(name, self._is_directory), value, now_ms, step)
            for name, value in metrics.items()
            if math.isfinite(value)
        ]
        for start in range(0, len(values), _MAX_METRICS):
            self._client.log_batch(self._run_id, metrics=values[start : start + _MAX_METRICS])

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Do nothing: texts are not kept in MLflow."""

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield (full key, value) for each value of the configuration."""
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _problems(at: str, mlflow: MlflowConfig) -> Iterator[Problem]:
    if importlib.util.find_spec("mlflow") is None:
        yield Problem(
            key=f"{at}.enabled=true",
            rule="needs the package mlflow, which is not installed",
            remedy="pip install mlflow, or use W&B or TensorBoard",
        )


def _machine_problems(at: str, mlflow: MlflowConfig) -> Iterator[Problem]:
    """Yield every reason why this machine cannot reach MLflow."""
    if importlib.util.find_spec("mlflow") is None:
        return
    uri = tracking_uri(mlflow)
    if uri is None:
        key, uri = f"{at}.tracking_uri=null", "sqlite:///mlflow.db"  # MLflow's own choice
    else:
        key = f"{at}.tracking_uri={uri}"
    scheme = urlparse(uri).scheme.partition("+")[0]
    if (directory := mlflow_directory(uri)) is not None:
        yield from _directory(key, directory)
    elif scheme in _SERVERS:
        yield from _server(key, uri, f"{at}.enabled=false")
    elif scheme in _DATABASES:
        if importlib.util.find_spec("sqlalchemy") is None:
            rule = f"keeps the runs in {uri}, which needs the package sqlalchemy, and that is not installed"
            remedy = "pip install mlflow (mlflow-skinny lacks it), or name a directory or a server"
            yield Problem(key=key, rule=rule, remedy=remedy)
    elif scheme not in (*_OTHERS, *(one.name for one in entry_points(group="mlflow.tracking_store"))):
        yield Problem(
            key=key,
            rule=f"begins with {scheme}:, which no installed part of MLflow understands",
            remedy="name a directory, a server (http://HOST:5000) or a database (sqlite:///FILE)",
        )


def _directory(key: str, directory: Path) -> Iterator[Problem]:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be written, because {existing} is not a directory or not writable"
        yield Problem(key=key, rule=rule, remedy="choose another directory, or name a server")


def _server(key: str, uri: str, off: str) -> Iterator[Problem]:
    """Yield a problem when no server answers at ``uri``.

    Any answer will do, even an HTTP error: whether this user may write there is not checked.
    """
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=_SERVER_TIMEOUT_S).close()
    except urllib.error.HTTPError:
        return
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", error)
        yield Problem(
            key=key,
            rule=f"does not answer within {_SERVER_TIMEOUT_S:g} s: {reason}",
            remedy=f"start it (mlflow server), correct the address, or set {off}",
        )


def _results(mlflow: MlflowConfig, run: LoggedRun) -> dict[str, str]:
    server = as_written(tracking_uri(mlflow) or "its own default")
    return {"MLflow": f"{server}, experiment {mlflow.experiment_name}"}


KIND = LoggerKind(
    about="an MLflow server, or a folder",
    label="MLflow",
    options=MlflowConfig,
    start=lambda mlflow, run: MlflowRecorder(mlflow, run.directory.name, run.resolved_config),
    is_on=lambda mlflow: mlflow.enabled,
    position=3,
    problems=_problems,
    machine_problems=_machine_problems,
    results=_results,
)
