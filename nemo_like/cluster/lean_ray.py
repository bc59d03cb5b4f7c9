"""How ``ray.init`` differs here: on loopback, with fewer processes, and with the caller's signals.

Dashboard, autoscaler and log monitor start although ``ray.init`` is told that there is no dashboard and no
log to forward, take two seconds of CPU, and keep the start and the end of a run waiting for a second each.
And all of Ray's processes listen on every interface of the machine unless its address is that of loopback,
for which ``ray.init`` takes another.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from ray._private import ray_constants, services, utils
from ray._private.node import Node


@contextmanager
def few_services() -> Iterator[None]:
    """Let a Ray that is started in this block listen on loopback alone, and have no more than it needs; all
    it has, where Ray's methods have other names than those known here."""
    replacements = {
        "start_api_server": _tell_of_no_dashboard,
        "start_monitor": _start_nothing,
        "start_log_monitor": _start_nothing,
    }
    originals = {name: getattr(Node, name) for name in replacements if hasattr(Node, name)}
    for name in originals:
        setattr(Node, name, replacements[name])
    # As Ray does by itself on macOS and Windows: the address of this node is then 127.0.0.1.
    may_have_other_nodes = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = may_have_other_nodes
        for name, original in originals.items():
            setattr(Node, name, original)


@contextmanager
def processes_with(variables: Mapping[str, str]) -> Iterator[None]:
    """Processes that Ray starts in this block, and what they start, have these environment variables. What
    other threads start has not."""
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
    """Ray replaces no handler of SIGTERM in this block. A signal that arrives meanwhile, whose exception got
    lost in Ray's code, is handled again at the end.

    Handlers belong to the main thread; elsewhere nothing changes.
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
    """SIGINT and SIGTERM that arrive in this block are handled at its end.

    Whoever interrupts ``ray.shutdown`` has a Ray that is half gone, and ends the process without a word as
    soon as Python frees one of its references. And Ray takes the handler of SIGTERM from the kernel when it
    is half through. Handlers belong to the main thread; elsewhere nothing changes.
    """
    kill_all_processes = Node.kill_all_processes  # what it does after that
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
    """Handle SIGINT and SIGTERM of this block at its end, and, if asked, also when they arrive. Gives what
    installs the handlers of this block again."""
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


def _tell_of_no_dashboard(node: Node, **_options: object) -> None:
    """As Ray's dashboard does where it serves no pages. Without it Ray's agents look for it every second."""
    node.get_gcs_client().internal_kv_put(
        ray_constants.DASHBOARD_ADDRESS.encode(), b":-1", True, ray_constants.KV_NAMESPACE_DASHBOARD
    )
