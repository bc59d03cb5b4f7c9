"""Ray itself: a private one on this machine, or one that exists already."""

from __future__ import annotations

import ipaddress
import logging
import os
import shutil
import socket
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import ray

from nemo_like.cluster.errors import ClusterError
from nemo_like.cluster.lean_ray import few_services

_MAX_SOCKET_PATH = 107  # bytes; Linux


@contextmanager
def ray_runtime(address: str | None, *, num_cpus: int, num_gpus: int) -> Iterator[None]:
    """Connect to ``address``, or start a private Ray with these logical resources; leave it on exit.

    On exit every non-detached actor of this process ends, and a private Ray with them.
    Raises ClusterError when an existing cluster has fewer CPUs or GPUs than asked for.
    """
    # An actor that asks for no GPU keeps the CUDA_VISIBLE_DEVICES it was given.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray makes its workers nicer than everything else on the machine; here they are what it is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Of past calls Ray would keep a hundred thousand, in some hundreds of MiB, for a list that nobody sees.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # When one call fails, nobody asks for the results of those beside it.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
    if address is None:
        # Workers that wait for tasks; here are actors only, most of them with an environment of their own.
        os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
        with few_services():
            ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, **quiet)
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    temporary = _temporary_directory()
    try:
        _check_resources(num_cpus, num_gpus)
        yield
    finally:
        ray.shutdown()
        if address is None:
            shutil.rmtree(temporary, ignore_errors=True)


def use_temporary_directory_of_session() -> None:
    """From now on the temporary files of this process and its children lie with those of Ray's session.

    What a killed process leaves there goes when a private Ray ends. Does nothing where there is no Ray, or
    where the path is too long for sockets.
    """
    if not ray.is_initialized():
        return
    directory = _temporary_directory()
    if len(str(directory)) + len(f"/{uuid.uuid4()}") < _MAX_SOCKET_PATH:
        directory.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


def _temporary_directory() -> Path:
    """On each node, below the directory in which Ray keeps its own sockets and logs."""
    return Path(ray._private.worker._global_node.get_session_dir_path()) / "tmp"


def _check_resources(num_cpus: float, num_gpus: float) -> None:
    there = ray.cluster_resources()
    for key, needed in (("CPU", num_cpus), ("GPU", num_gpus)):
        if there.get(key, 0.0) < needed:
            raise ClusterError(
                f"the Ray cluster has {there.get(key, 0.0):g} {key}s but the run's actors need {needed:g}; "
                "add nodes or lower the number of workers and engines"
            )


def free_port() -> int:
    """A TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """The network interface with this IP address; None when this machine has none."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in (item.address for item in own)), None)
