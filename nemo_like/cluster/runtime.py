"""Ray itself: a private one on this machine, or one that exists already."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import ray

from nemo_like.cluster.errors import ClusterError


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
        ray.init(address="local", num_cpus=num_cpus, num_gpus=num_gpus, **quiet)
    else:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    try:
        _check_resources(num_cpus, num_gpus)
        yield
    finally:
        ray.shutdown()


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
