"""Actors by name: plain classes run in their own processes, without their imports in the caller's.

A process is described by an ``ActorSpec`` whose ``target`` is an import path. The caller never
imports the target's module, so the driver's process loads no tensor library. Nothing here knows of
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import ray

from nemo_like.cluster.imports import load_target
from nemo_like.cluster.runtime import interface_of
from nemo_like.cluster.stacks import dump_stacks_on_signal
from nemo_like.observability.process import ProcessObserver
from nemo_like.observability.trace import span


class Concurrency(Enum):
    """``serial``: one call at a time, always on the same thread. ``asyncio``: coroutines interleave."""

    serial = "serial"
    asyncio = "asyncio"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One process: ``target`` is "package.module:Class", built there with ``kwargs``."""

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_cpus: float = 1.0
    num_gpus: float = 0.0
    env: Mapping[str, str] = field(default_factory=dict)
    concurrency: Concurrency = Concurrency.serial
    log_path: str | None = None  # stdout and stderr of the process go there


@dataclass(frozen=True, slots=True)
class Call:
    """A pending method call: awaitable inside asyncio actors; elsewhere ``Cluster.gather`` or ``result``."""

    actor: str
    method: str
    ref: ray.ObjectRef

    def result(self, timeout_s: float) -> Any:
        """The method's result; raises what it raised, or ray.exceptions.GetTimeoutError."""
        return ray.get(self.ref, timeout=timeout_s)

    def __await__(self) -> Any:
        return self.ref.__await__()


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """Reference to a running actor; can be passed to other actors."""

    name: str
    log_path: str | None
    _remote: Any

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> Call:
        """Start ``target.method(*args, **kwargs)`` over there and return at once."""
        return Call(self.name, method, self._remote.call.remote(method, *args, **kwargs))

    def watch(self) -> Call:
        """A call that never returns while the actor lives and fails the moment it dies."""
        return Call(self.name, "watch", self._remote.watch.remote())

    def process_id(self) -> Call:
        """Of the process on its node."""
        return Call(self.name, "process_id", self._remote.process_id.remote())

    def observe(self, method: str, /, *args: Any) -> Call:
        """Start a method of the process's ``ProcessObserver``."""
        return Call(self.name, method, self._remote.observe.remote(method, *args))

    def kill(self) -> None:
        ray.kill(self._remote)


def log_to(log_path: str) -> None:
    """Send this process's stdout and stderr, also those of C++ code, to its own file, and at SIGUSR2 its
    stacks."""
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    dump_stacks_on_signal()


def _end_at_sigterm() -> None:
    """From now on SIGTERM ends this process at once.

    Ray's own handler lets every call end first. One of them, the watch on this actor, never does.
    """
    # Python sets handlers on the main thread, and Ray constructs some actors on another.
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_DFL))


def _use_interface_of_node() -> None:
    """Collectives go through the network that Ray uses between nodes, unless the environment says another;
    by themselves they would look up the host's name, which often leads to loopback."""
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)


def _work_in(directory: str) -> None:
    """Let relative paths mean what they mean to the driver: a Ray that exists already was started anywhere.
    A node without this directory may well have what absolute paths name."""
    if os.path.isdir(directory):
        os.chdir(directory)


class _Shell:
    """Holds the target. A constructor that raised fails every later call with its own error."""

    def __init__(self, spec: ActorSpec, directory: str) -> None:
        """``directory`` is the driver's."""
        _work_in(directory)
        if spec.log_path is not None:
            log_to(spec.log_path)
        _end_at_sigterm()
        _use_interface_of_node()
        self._observer = ProcessObserver()
        self._failure: Exception | None = None
        try:
            self._target = load_target(spec.target)(**spec.kwargs)
        except Exception as error:
            traceback.print_exc()
            self._failure = error

    def process_id(self) -> int:
        return os.getpid()

    def observe(self, method: str, *args: Any) -> Any:
        return getattr(self._observer, method)(*args)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self._raise_failure()
        return getattr(self._target, method)(*args, **kwargs)

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _SerialShell(_Shell):
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with span(method):
            return self._call(method, args, kwargs)

    @ray.method(concurrency_group="control")
    def watch(self) -> None:
        self._raise_failure()
        threading.Event().wait()


class _AsyncShell(_Shell):
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with span(method):
            result = self._call(method, args, kwargs)
            return await result if asyncio.iscoroutine(result) else result

    async def watch(self) -> None:
        self._raise_failure()
        await asyncio.Event().wait()


def start_actor(spec: ActorSpec, **options: Any) -> ActorHandle:
    """Start the process and return at once; its constructor's error surfaces on the first call."""
    resources: dict[str, Any] = {
        "name": spec.name,
        "num_cpus": spec.num_cpus,
        "num_gpus": spec.num_gpus,
        "runtime_env": {"env_vars": dict(spec.env)},
        "max_restarts": 0,
        **options,
    }
    if spec.concurrency is Concurrency.serial:
        remote = ray.remote(concurrency_groups={"control": 1})(_SerialShell).options(**resources)
    else:
        remote = ray.remote(_AsyncShell).options(max_concurrency=1000, **resources)
    return ActorHandle(spec.name, spec.log_path, remote.remote(spec, os.getcwd()))
