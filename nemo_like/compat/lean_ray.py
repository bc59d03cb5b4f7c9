"""Changes to ``ray.init``: Ray listens on loopback, has fewer processes, and leaves signals to the caller.

Even when it is told to start no dashboard and forward no logs, ``ray.init`` starts a dashboard, an
autoscaler and a log monitor, and its raylet an agent of the dashboard. They take four seconds of CPU and
delay the start and the end of a run by a second each. Every worker's process begins with a program that
imports Ray, only to execute another. All of Ray's processes also listen on every interface of the machine,
unless the node's address is on loopback; ``ray.init`` replaces a loopback address by another.

Private parts: ``ray._private`` of ray 2.60.0, functions and constants of which are replaced while Ray starts
or ends. ``ray.init`` has no argument for any of this. This module can go with a Ray that has.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray._private import ray_constants, services, utils
from ray._private.node import Node

from nemo_like.compat import absent_agent, worker_start


@contextmanager
def few_services() -> Iterator[None]:
    """Let a Ray that is started in this block listen on loopback alone, and start only what a run needs.

    A service starts as usual when this version of Ray lacks the method that is replaced here.
    """
    replacements = {
        "start_api_server": _announce_no_dashboard,
        "start_monitor": _start_nothing,
        "start_log_monitor": _start_nothing,
    }
    originals = {name: getattr(Node, name) for name in replacements if hasattr(Node, name)}
    for name in originals:
        setattr(Node, name, replacements[name])
    start = services.start_ray_process
    services.start_ray_process = _with_stand_ins(start)
    # Ray does the same by itself on macOS and Windows. The address of this node is then 127.0.0.1.
    may_have_other_nodes = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_have_other_nodes
        services.start_ray_process = start
        for name, original in originals.items():
            setattr(Node, name, original)


@contextmanager
def processes_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Give these environment variables to the processes that Ray starts in this block, and to their children.

    The variables never enter this process's own environment, so processes that other code starts do not get
    them.
    """
    start = services.start_ray_process

    def start_with(*args: Any, env_updates: Mapping[str, str] | None = None, **kwargs: Any) -> Any:
        return start(*args, env_updates={**(env_updates or {}), **variables}, **kwargs)

    services.start_ray_process = start_with
    try:
        yield
    finally:
        services.start_ray_process = start


@contextmanager
def callers_signals() -> Iterator[None]:
    """Keep Ray from replacing the handler of SIGTERM in this block.

    A signal that arrives in the block is handled at once and again at its end, since Ray's code may have
    swallowed the exception that the handler raised. Handlers belong to the main thread; called on another,
    this leaves them alone.
    """
    original = utils.set_sigterm_handler
    utils.set_sigterm_handler = _start_nothing
    try:
        with _noted_signals(are_handled_at_once=True):
            yield
    finally:
        utils.set_sigterm_handler = original


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Put off the handling of SIGINT and SIGTERM that arrive in this block until its end.

    An interrupted ``ray.shutdown`` leaves half of Ray behind, which ends the process without a message as
    soon as Python frees one of Ray's references. Half-way through, ``ray.shutdown`` also resets SIGTERM's
    handler in the kernel, so this block sets its handlers again there. Handlers belong to the main thread;
    called on another, this leaves them alone.
    """
    kill_all_processes = Node.kill_all_processes  # ray.shutdown calls it after it has reset the handler
    with _noted_signals(are_handled_at_once=False) as install_again:

        def kill_with_handlers(*args: Any, **kwargs: Any) -> Any:
            install_again()
            return kill_all_processes(*args, **kwargs)

        Node.kill_all_processes = kill_with_handlers
        try:
            yield
        finally:
            Node.kill_all_processes = kill_all_processes


@contextmanager
def _noted_signals(*, are_handled_at_once: bool) -> Iterator[Callable[[], None]]:
    """Handle SIGINT and SIGTERM of this block at its end and, with ``are_handled_at_once``, on arrival too.

    Yields a function that installs this block's handlers again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    handlers: dict[int, Callable] = {
        signum: handler
        for signum in (signal.SIGINT, signal.SIGTERM)
        if callable(handler := signal.getsignal(signum))
    }
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signum)
        if are_handled_at_once:
            handlers[signum](signum, frame)

    def install() -> None:
        for signum in handlers:
            signal.signal(signum, handle)

    install()
    try:
        yield install
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)
    for signum in received:
        handlers[signum](signum, None)


def _start_nothing(_: object) -> None:
    pass


def _with_stand_ins(start: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that starts processes as ``start`` does, except that a raylet gets stand-ins for two
    of Ray's programs: the dashboard's agent, without which it would end, and the one that starts workers."""
    stand_ins = {
        "--dashboard_agent_command=": (("dashboard", "agent.py"), absent_agent.__file__),
        "--python_worker_command=": (("_private", "workers", "setup_worker.py"), worker_start.__file__),
    }

    def replaced(argument: str) -> str:
        for option, (parts, stand_in) in stand_ins.items():
            if argument.startswith(option):
                return argument.replace(os.path.join(services.RAY_PATH, *parts), stand_in)
        return argument

    def start_with(command: list[str], *args: Any, **kwargs: Any) -> Any:
        return start([replaced(argument) for argument in command], *args, **kwargs)

    return start_with


def _announce_no_dashboard(node: Node, **_options: object) -> None:
    """Tell Ray's agents that there is no dashboard; otherwise they look for one every second.

    Ray's own dashboard writes the same value where it serves no pages.
    """
    node.get_gcs_client().internal_kv_put(
        ray_constants.DASHBOARD_ADDRESS.encode(), b":-1", True, ray_constants.KV_NAMESPACE_DASHBOARD
    )
