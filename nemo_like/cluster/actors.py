"""Actors: plain classes, each run in a process of its own and called through an ``ActorHandle``.

An ``ActorSpec`` describes the process; its ``target`` is the class's import path. Only the new process
imports the target's module, so the driver's process loads no tensor library. Nothing here knows of
reinforcement learning.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import ray

from nemo_like.cluster.breakdown import Breakdown, breakdown_future
from nemo_like.cluster.imports import load_target
from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.cluster.runtime import interface_of
from nemo_like.cluster.stacks import dump_stacks_on_signal
from nemo_like.observability.bounded_log import keep_short
from nemo_like.observability.printable import accept_all_characters
from nemo_like.observability.process import ProcessObserver
from nemo_like.observability.trace import span


class Concurrency(Enum):
    """How an actor runs its calls.

    ``serial``: one call at a time, always on the same thread. ``asyncio``: coroutines interleave, and so do
    the methods in ``ActorSpec.in_threads``; other methods run one at a time.
    """

    serial = "serial"
    asyncio = "asyncio"


@dataclass(frozen=True, slots=True)
class ActorSpec:
    """One process to start. It builds its ``target``, "package.module:Class", with ``kwargs``."""

    name: str
    target: str
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    num_cpus: float = 1.0
    env: Mapping[str, str] = field(default_factory=dict)
    concurrency: Concurrency = Concurrency.serial
    in_threads: Collection[str] = ()  # asyncio: methods that may block; each call of them gets a thread
    log_path: str | None = None  # the process writes its stdout and stderr to this file
    without: Collection[str] = ()  # optional packages that the target's module is imported without


@dataclass(frozen=True, slots=True)
class Call:
    """A method call under way. Asyncio actors ``await`` it; others use ``Cluster.gather`` or ``result``."""

    actor: str
    method: str
    ref: ray.ObjectRef

    def result(self, timeout_s: float) -> Any:
        """Wait for the call and return its result.

        Raises the method's own error, or ray.exceptions.GetTimeoutError after ``timeout_s``.
        """
        return ray.get(self.ref, timeout=timeout_s)

    def __await__(self) -> Any:
        return self.ref.__await__()


@dataclass(frozen=True, slots=True)
class ActorHandle:
    """A reference to a running actor, which can be passed to other actors."""

    name: str
    log_path: str | None
    _remote: Any

    def submit(self, method: str, /, *args: Any, **kwargs: Any) -> Call:
        """Start ``target.method(*args, **kwargs)`` in the actor and return at once."""
        return Call(self.name, method, self._remote.call.remote(method, *args, **kwargs))

    def watch(self) -> Call:
        """Start a call that lasts as long as the actor is of use.

        It fails as soon as the actor dies, and also when its constructor raised. It returns a ``Breakdown``
        when the process says that it is no longer usable.
        """
        return Call(self.name, "watch", self._remote.watch.remote())

    def process_id(self) -> Call:
        """Ask the actor for its process id on its node."""
        return Call(self.name, "process_id", self._remote.process_id.remote())

    def observe(self, method: str, /, *args: Any) -> Call:
        """Start ``method`` of the ``ProcessObserver`` that the actor's process holds."""
        return Call(self.name, method, self._remote.observe.remote(method, *args))

    def kill(self) -> None:
        ray.kill(self._remote)


def log_to(log_path: str) -> None:
    """Send this process's stdout and stderr, also those of C++ code, to the file ``log_path``.

    From then on SIGUSR2 makes the process write its threads' stacks there too, and the file is kept short.
    """
    os.makedirs(os.path.dirname(log_path), exist_ok=True)
    descriptor = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    accept_all_characters()
    dump_stacks_on_signal()
    keep_short(Path(log_path))


def _end_at_sigterm() -> None:
    """Let SIGTERM end this process at once from now on.

    Ray's own handler waits until every call has ended, but the watch on this actor never ends by itself.
    """
    # Python allows handlers to be set on the main thread only, but Ray constructs some actors on another.
    ctypes.CDLL(None).signal(signal.SIGTERM, ctypes.c_void_p(signal.SIG_DFL))


def _use_interface_of_node() -> None:
    """Have gloo and NCCL use the network interface of Ray's node address, unless the environment names one.

    By themselves they would look up the host's name, which often leads to loopback.
    """
    interface = interface_of(ray.util.get_node_ip_address())
    if interface is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, interface)


def _work_in(directory: str) -> None:
    """Change to the driver's directory, so that relative paths mean the same here as in the driver.

    An existing Ray may have been started in any directory. On a node that lacks the driver's directory
    nothing changes: absolute paths may work there all the same.
    """
    if os.path.isdir(directory):
        os.chdir(directory)


class _Shell:
    """The Ray actor around the target: it builds the target and forwards calls to it.

    Where the target's constructor raised, every later call raises that error.
    """

    def __init__(self, spec: ActorSpec, directory: str) -> None:
        """Prepare the process, then build the target. ``directory`` is the driver's working directory."""
        _work_in(directory)
        if spec.log_path is not None:
            log_to(spec.log_path)
        _end_at_sigterm()
        bypass_proxies()
        _use_interface_of_node()
        self._observer = ProcessObserver()
        self._failure: Exception | None = None
        self._in_threads = spec.in_threads
        try:
            self._target = load_target(spec.target, spec.without)(**spec.kwargs)
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

    @contextmanager
    def _traced(self) -> Iterator[None]:
        """Write the stack of an error that the block raises into this process's log. The driver names the log
        beside the error's text."""
        try:
            yield
        except Exception as error:
            if error is not self._failure:  # its stack is there already
                traceback.print_exc()
            raise

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _SerialShell(_Shell):
    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with span(method), self._traced():
            return self._call(method, args, kwargs)

    @ray.method(concurrency_group="control")
    def watch(self) -> Breakdown:
        self._raise_failure()
        return breakdown_future().result()


class _AsyncShell(_Shell):
    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        with span(method), self._traced():
            if method in self._in_threads:
                return await asyncio.to_thread(self._call, method, args, kwargs)
            result = self._call(method, args, kwargs)
            return await result if asyncio.iscoroutine(result) else result

    async def watch(self) -> Breakdown:
        self._raise_failure()
        return await asyncio.shield(asyncio.wrap_future(breakdown_future()))


def runtime_env(variables: Mapping[str, str]) -> dict[str, Any]:
    """Return Ray's description of a process that has these environment variables, and that finds the modules
    on this process's PYTHONPATH after those on its own.

    Ray starts such a process by a shell, to which it gives the interpreter's path unquoted: a path with a
    space would be taken for a command and an argument, and Ray would try again for ever.
    """
    described: dict[str, Any] = {"env_vars": dict(variables)}
    if path := os.environ.get("PYTHONPATH"):
        described["env_vars"]["PYTHONPATH"] = f"${{PYTHONPATH}}{os.pathsep}{path}"
    if (quoted := shlex.quote(sys.executable)) != sys.executable:
        described["py_executable"] = quoted
    return described


def start_actor(spec: ActorSpec, **options: Any) -> ActorHandle:
    """Start the process and return at once; an error of the target's constructor surfaces on the first call.

    ``options`` are further options of a Ray actor, and win over the options that ``spec`` implies.
    """
    resources: dict[str, Any] = {
        "name": spec.name,
        "num_cpus": spec.num_cpus,
        "runtime_env": runtime_env(spec.env),
        "max_restarts": 0,
        **options,
    }
    if spec.concurrency is Concurrency.serial:
        remote = ray.remote(concurrency_groups={"control": 1})(_SerialShell).options(**resources)
    else:
        remote = ray.remote(_AsyncShell).options(max_concurrency=1000, **resources)
    return ActorHandle(spec.name, spec.log_path, remote.remote(spec, os.getcwd()))
