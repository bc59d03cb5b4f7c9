"""One gloo device for all process groups of a process.

torch gives every gloo group a device of its own, which is a thread that wakes up a hundred times a second.
Megatron-core and vLLM make dozens of groups in each process, most of which hold one rank and are never used:
on two cores those threads took a twentieth of the time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from torch import distributed as dist
from torch.distributed import distributed_c10d


class _SharingGloo(dist.ProcessGroupGloo):
    """As torch makes it, but for the device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Groups that torch.distributed makes in this block, on any thread, share this process's device."""
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _SharingGloo
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original


@functools.cache
def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """One for each interface that GLOO_SOCKET_IFNAME names, or the default one, as torch chooses them."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = dist.ProcessGroupGloo.create_device
    return [create(interface=name) for name in interfaces] or [dist.ProcessGroupGloo.create_default_device()]
