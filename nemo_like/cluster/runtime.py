"""Ray itself: a private one on this machine, or one that exists already."""

from __future__ import annotations

import ipaddress
import logging
import os
import socket
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray
from ray.exceptions import AuthenticationError

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.janitor import MARK
from nemo_like.cluster.lean_ray import callers_signals
from nemo_like.cluster.private_ray import PrivateRay

_MAX_SOCKET_PATH = 107  # bytes; Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNeeds:
    """What a run wants of Ray."""

    address: str | None  # of a Ray that exists; null: a private one on this machine
    num_cpus: int  # logical
    num_gpus: int
    start_timeout_s: float
    logs_path: Path | None = None  # gets the logs of a private Ray under which something failed


@contextmanager
def ray_runtime(
    needs: RayNeeds, warn: Callable[[str], None], last_words: Callable[[str], None] = print
) -> Iterator[Callable[[], str | None]]:
    """Connect to Ray, or start a private one; leave it on exit.

    Gives a function that returns why a private Ray is of no more use, None while it is. On exit every
    non-detached actor of this process ends, and a private Ray with all its processes and files, which also go
    when this process is killed. ``warn`` hears of each attempt that failed; ``last_words`` of a private Ray's
    death, when this process ends for that.
    Raises ClusterError when Ray cannot be had in time, and when an existing cluster has fewer CPUs or GPUs
    than asked for.
    """
    # An actor that asks for no GPU keeps the CUDA_VISIBLE_DEVICES it was given.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray makes its workers nicer than everything else on the machine; here they are what it is for.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Of past calls Ray would keep a hundred thousand, in some hundreds of MiB, for a list that nobody sees.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # When one call fails, nobody asks for the results of those beside it.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    private = PrivateRay(num_cpus=needs.num_cpus, num_gpus=needs.num_gpus, last_words=last_words)
    try:
        if needs.address is None:
            private.start(needs.start_timeout_s, warn)
        else:
            _join(needs.address)
        _check_resources(needs.num_cpus, needs.num_gpus)
        yield private.failure
    except Exception:
        if needs.logs_path is not None:
            private.keep_logs(needs.logs_path)
        raise
    finally:
        private.stop()


def _join(address: str) -> None:
    try:
        with callers_signals():
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError) as error:
        raise ClusterError(f"cluster.address={address}: {no_ray(error)}") from error


def no_ray(error: Exception) -> str:
    """Return why Ray cannot be joined, and what to do."""
    chain: list[BaseException | None] = [error]
    while (last := chain[-1]) is not None:
        if isinstance(last, AuthenticationError):
            return (
                "the Ray there asks for a token that this process does not have. Set RAY_AUTH_MODE=token, "
                "and RAY_AUTH_TOKEN_PATH where the token is not in ~/.ray/auth_token"
            )
        chain.append(last.__cause__ or last.__context__)
    return (
        f"no Ray can be reached there ({error}). Start one with `ray start`, or take cluster.address=null "
        "for a private one"
    )


def use_temporary_directory_of_session() -> None:
    """From now on the temporary files of this process and its children lie with those of Ray's session.

    What a killed process leaves there goes with the session. Does nothing where there is no Ray, where Ray is
    private and all its processes have such a place, or where the path is too long for sockets.
    """
    if not ray.is_initialized() or MARK in os.environ:
        return
    # On each node, below the directory in which Ray keeps its own sockets and logs.
    context = ray.get_runtime_context()
    directory = Path(context.get_temp_dir(), context.get_session_name(), "tmp")
    if len(str(directory)) + len(f"/{uuid.uuid4()}") < _MAX_SOCKET_PATH:
        directory.mkdir(exist_ok=True)
        os.environ["TMPDIR"] = tempfile.tempdir = str(directory)


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
