"""Rules on the metrics back ends, for what they would otherwise refuse after the run has begun."""

from __future__ import annotations

import errno
import importlib.util
import netrc
import os
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from urllib.parse import urlparse

from nemo_like.config.problems import Problem
from nemo_like.observability.options import (
    LoggerConfig,
    MlflowConfig,
    PrometheusConfig,
    WandbConfig,
    WandbMode,
    mlflow_directory,
)
from nemo_like.policy.options import Device

_WANDB_FORBIDDEN = "/\\#?%:"
_WANDB_MAX_NAME, _WANDB_MAX_TAG = 128, 64

_MLFLOW_SERVERS = ("http", "https")
_MLFLOW_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_MLFLOW_OTHERS = ("databricks", "uc", "databricks-uc")
_SERVER_TIMEOUT_S = 5.0


def step_problems(logger: LoggerConfig, num_steps: int, device: Device) -> Iterator[Problem]:
    """Yield a problem for every key that names a step which a run of ``num_steps`` steps does not make, or
    asks for what does not exist on its device."""
    asked = {"logger.trace_steps": logger.trace_steps, "logger.profile.steps": logger.profile.steps}
    for key, steps in asked.items():
        if num_steps >= 1 and any(not 1 <= step <= num_steps for step in steps):
            yield Problem(
                key=f"{key}={steps}",
                rule=f"must name steps from 1 to grpo.max_num_steps={num_steps}",
                remedy="the third step is past what only first steps do",
            )
    if logger.nvtx_ranges and device is Device.cpu:
        yield Problem(
            key="logger.nvtx_ranges=true",
            rule="needs policy.device=cuda",
            remedy="on CPU use logger.trace_steps or logger.profile",
        )


def logger_problems(logger: LoggerConfig) -> Iterator[Problem]:
    """Yield every problem with the back ends' keys, packages and credentials."""
    yield from _wandb(logger.wandb)
    port = logger.prometheus.port
    if port is not None and not _is_port(port):
        yield Problem(
            key=f"logger.prometheus.port={port}",
            rule="must be from 1 to 65535",
            remedy="null switches it off",
        )
    if logger.mlflow.enabled and importlib.util.find_spec("mlflow") is None:
        yield Problem(
            key="logger.mlflow.enabled=true",
            rule="needs the package mlflow, which is not installed",
            remedy="pip install mlflow, or use W&B or TensorBoard",
        )


def logger_machine_problems(logger: LoggerConfig) -> Iterator[Problem]:
    """Yield everything that keeps this machine from reaching MLflow, and Prometheus from reaching the run."""
    yield from _listening(logger.prometheus)
    yield from _mlflow(logger.mlflow)


def _listening(prometheus: PrometheusConfig) -> Iterator[Problem]:
    """Yield a problem when nobody can listen at Prometheus' address, which is tried."""
    if prometheus.port is None or not _is_port(prometheus.port):
        return
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            prometheus.host, prometheus.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind) as probe:
            # As the endpoint does: connections of a run that just ended are in nobody's way.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen()
    except OSError as error:
        port, host = f"logger.prometheus.port={prometheus.port}", f"logger.prometheus.host={prometheus.host}"
        if error.errno == errno.EADDRINUSE:
            rule, remedy = f"is in use on {prometheus.host}", "another run may have it; choose another port"
            yield Problem(key=port, rule=rule, remedy=remedy)
        elif error.errno == errno.EACCES:
            yield Problem(key=port, rule="may not be used by this user", remedy="choose one above 1023")
        else:
            rule = f"is no address of this machine: {error.strerror or error}"
            yield Problem(key=host, rule=rule, remedy="127.0.0.1 is for this machine alone, 0.0.0.0 for all")


def _mlflow(mlflow: MlflowConfig) -> Iterator[Problem]:
    """Yield everything that keeps this machine from reaching MLflow."""
    if not mlflow.enabled or importlib.util.find_spec("mlflow") is None:
        return
    uri = mlflow.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
    if uri is None:
        key, uri = "logger.mlflow.tracking_uri=null", "sqlite:///mlflow.db"  # MLflow's own choice
    else:
        key = f"logger.mlflow.tracking_uri={uri}"
    scheme = urlparse(uri).scheme.partition("+")[0]
    if (directory := mlflow_directory(uri)) is not None:
        yield from _directory(key, directory)
    elif scheme in _MLFLOW_SERVERS:
        yield from _server(key, uri)
    elif scheme in _MLFLOW_DATABASES:
        if importlib.util.find_spec("sqlalchemy") is None:
            rule = f"keeps the runs in {uri}, which needs the package sqlalchemy, and that is not installed"
            remedy = "pip install mlflow (mlflow-skinny lacks it), or name a directory or a server"
            yield Problem(key=key, rule=rule, remedy=remedy)
    elif scheme not in (*_MLFLOW_OTHERS, *(one.name for one in entry_points(group="mlflow.tracking_store"))):
        yield Problem(
            key=key,
            rule=f"begins with {scheme}:, which no installed part of MLflow understands",
            remedy="name a directory, a server (http://HOST:5000) or a database (sqlite:///FILE)",
        )


def _wandb(wandb: WandbConfig) -> Iterator[Problem]:
    if wandb.mode is WandbMode.disabled:
        return
    if wandb.mode is WandbMode.online and not _has_wandb_key():
        yield Problem(
            key="logger.wandb.mode=online",
            rule="needs an API key, and neither WANDB_API_KEY nor a netrc file has one",
            remedy="run `wandb login`, set WANDB_API_KEY, or use logger.wandb.mode=offline",
        )
    found = sorted(set(wandb.project) & set(_WANDB_FORBIDDEN))
    if found or not 1 <= len(wandb.project) <= _WANDB_MAX_NAME:
        yield Problem(
            key=f"logger.wandb.project={wandb.project}",
            rule=f"must have 1 to {_WANDB_MAX_NAME} characters and none of {' '.join(_WANDB_FORBIDDEN)}",
            remedy="whose project it is says logger.wandb.entity" if "/" in found else "",
        )
    for index, tag in enumerate(wandb.tags):
        if not 1 <= len(tag) <= _WANDB_MAX_TAG:
            yield Problem(
                key=f"logger.wandb.tags[{index}]={tag}",
                rule=f"must have 1 to {_WANDB_MAX_TAG} characters",
                remedy="longer texts belong in logger.wandb.notes",
            )
    for name in ("group", "job_type"):
        value = getattr(wandb, name)
        if value is not None and not 1 <= len(value) <= _WANDB_MAX_NAME:
            rule = f"must have 1 to {_WANDB_MAX_NAME} characters"
            yield Problem(key=f"logger.wandb.{name}={value}", rule=rule, remedy="null leaves it out")


def _directory(key: str, directory: Path) -> Iterator[Problem]:
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be written, because {existing} is not a directory or not writable"
        yield Problem(key=key, rule=rule, remedy="choose another directory, or name a server")


def _server(key: str, uri: str) -> Iterator[Problem]:
    """Yield a problem when no server answers at ``uri``.

    Any answer will do, an HTTP error too: whether this user may write there is not checked.
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
            remedy="start it (mlflow server), correct the address, or set logger.mlflow.enabled=false",
        )


def _is_port(number: int) -> bool:
    return 1 <= number <= 65535


def _has_wandb_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", Path.home() / ".netrc"))
    try:
        return path.is_file() and netrc.netrc(str(path)).authenticators(host) is not None
    except netrc.NetrcParseError:
        return False
