"""Records a run in MLflow."""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.observability.options import MlflowConfig, mlflow_directory
from nemo_like.observability.summary import SampleAnswer

# How many of them one request may carry.
_MAX_METRICS, _MAX_PARAMS = 1000, 100


def tracking_uri(cfg: MlflowConfig) -> str | None:
    """Return where the runs are kept; None leaves the choice to MLflow."""
    return cfg.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")


def mlflow_name(name: str, is_directory: bool) -> str:
    """Return the metric's name as MLflow takes it, without "@" and other signs that it refuses.

    In a directory a name is the path of a file. There the name keeps only its first "/", so that no metric
    has another's path as its directory.
    """
    allowed = re.sub(r"[^\w.\- :/]", "_", name.replace("@", "_at_"))
    if not is_directory:
        return allowed
    group, slash, rest = allowed.partition("/")
    return group + slash + rest.replace("/", ".")


class MlflowRecorder:
    """A ``Recorder`` that writes a run into the experiment which the configuration names."""

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
