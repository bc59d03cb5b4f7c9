"""A private Ray without the processes that serve nobody here: dashboard, autoscaler, log monitor.

They start although ``ray.init`` is told that there is no dashboard and no log to forward, take two seconds of
CPU, and keep the start and the end of a run waiting for a second each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import ray_constants
from ray._private.node import Node


@contextmanager
def few_services() -> Iterator[None]:
    """A Ray that is started in this block has no more than it needs; all it has, where Ray's methods have
    other names than those known here."""
    replacements = {
        "start_api_server": _tell_of_no_dashboard,
        "start_monitor": _start_nothing,
        "start_log_monitor": _start_nothing,
    }
    originals = {name: getattr(Node, name) for name in replacements if hasattr(Node, name)}
    for name in originals:
        setattr(Node, name, replacements[name])
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(Node, name, original)


def _start_nothing(_node: Node) -> None:
    pass


def _tell_of_no_dashboard(node: Node, **_options: object) -> None:
    """As Ray's dashboard does where it serves no pages. Without it Ray's agents look for it every second."""
    node.get_gcs_client().internal_kv_put(
        ray_constants.DASHBOARD_ADDRESS.encode(), b":-1", True, ray_constants.KV_NAMESPACE_DASHBOARD
    )
