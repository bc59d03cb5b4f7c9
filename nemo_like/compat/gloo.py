"""One gloo device that all process groups of a process share.

torch gives every gloo group a device of its own, whose thread wakes up a hundred times a second.
Megatron-core and vLLM make dozens of groups in each process, and most of them hold one rank and are never
used. On two cores the threads of all these devices took a twentieth of the time.

Private parts: ``distributed_c10d.ProcessGroupGloo`` of torch 2.13.0, which is replaced while groups are made,
and gloo's ``_Options``. ``new_group`` takes no options for gloo's devices, and other libraries call it. This
module can go with a torch that shares its gloo devices.
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
    """A gloo group as torch would make it, except that it uses this process's shared devices."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timeout
        options._devices = _devices()
        options._threads = 2 * len(options._devices)
        super().__init__(store, rank, size, options)


@contextmanager
def one_gloo_device() -> Iterator[None]:
    """Let the gloo groups that torch.distributed makes in this block, on any thread, share one device."""
    original = distributed_c10d.ProcessGroupGloo
    distributed_c10d.ProcessGroupGloo = _SharingGloo
    try:
        yield
    finally:
        distributed_c10d.ProcessGroupGloo = original


@functools.cache
def _devices() -> list[dist.ProcessGroupGloo.Device]:
    """Return a device for each interface that GLOO_SOCKET_IFNAME names, else torch's default device."""
    interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    create = dist.ProcessGroupGloo.create_device
    return [create(interface=name) for name in interfaces] or [dist.ProcessGroupGloo.create_default_device()]
