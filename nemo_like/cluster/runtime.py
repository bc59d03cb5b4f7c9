"""Connects this process to Ray: to a private one on this machine, or to one that exists already."""

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
from nemo_like.cluster.fork_server import ForkServer
from nemo_like.cluster.janitor import MARK
from nemo_like.cluster.private_ray import PrivateRay
from nemo_like.compat.lean_ray import callers_signals

_MAX_SOCKET_PATH = 107  # bytes; Linux


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNeeds:
    """What a run needs of Ray."""

    address: str | None  # of a Ray that exists; null: a private one on this machine
    num_cpus: int  # logical
    num_gpus: int
    start_timeout_s: float
    logs_path: Path | None = None  # gets the logs of a private Ray under which something failed
    fork_server: ForkServer | None = None  # of a private Ray


@contextmanager
def ray_runtime(
    needs: RayNeeds, warn: Callable[[str], None], last_words: Callable[[str], None] = print
) -> Iterator[Callable[[], str | None]]:
    """Join an existing Ray or start a private one; leave or end it on exit.

    Yields a function that returns why a private Ray is no longer usable, or None while it works. On exit
    every non-detached actor of this process ends. A private Ray ends with all its processes, and its files
    are removed; inside ``swept_directory`` the same happens when this process is killed. ``warn`` is told of
    each failed attempt to start one; ``last_words`` gets the reason when this process must end because its
    private Ray died. Raises ClusterError when Ray cannot be started or joined in time, or has fewer CPUs or
    GPUs than asked for.
    """
    # Ray leaves CUDA_VISIBLE_DEVICES alone for an actor that asks for no GPU.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # By default Ray gives its workers a lower priority than all else, but here they do the actual work.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Otherwise Ray records a hundred thousand past calls, in some hundreds of MiB, for a list nobody sees.
    os.environ.setdefault("RAY_task_events_report_interval_ms", "0")
    # When one call fails, nobody asks for the others' results; Ray need not warn of their errors.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    private = PrivateRay(
        num_cpus=needs.num_cpus,
        num_gpus=needs.num_gpus,
        last_words=last_words,
        fork_server=needs.fork_server,
    )
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
        raise ClusterError(f"cluster.address={address}: {why_not_joined(error)}") from error


def why_not_joined(error: Exception) -> str:
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
    """Put the temporary files of this process and its children into Ray's session directory from now on.

    Files that a killed process leaves there are removed with the session. Does nothing without Ray, under a
    private Ray, whose processes have such a directory already, or where the path is too long for sockets.
    """
    if not ray.is_initialized() or MARK in os.environ:
        return
    # Every node has this directory, in which Ray keeps its own sockets and logs.
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
    """Return a TCP port that was free on this machine a moment ago."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def interface_of(address: str) -> str | None:
    """Return the name of the network interface with this IP address; None when no interface has it."""
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, own in interfaces if address in (item.address for item in own)), None)
