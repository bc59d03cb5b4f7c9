"""Mooncake's segments in host memory, reached over TCP or RDMA."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data_plane.options import DataPlaneConfig, MooncakeConfig, MooncakeProtocol
from nemo_like.data_plane.storage_kind import StorageKind

# Libraries that Mooncake's own are linked with and that not every machine has: library -> Debian package.
_MOONCAKE_LIBRARIES = {
    "libibverbs.so.1": "libibverbs1",
    "libnl-3.so.200": "libnl-3-200",
    "libnl-route-3.so.200": "libnl-route-3-200",
    "libnuma.so.1": "libnuma1",
    "libcurl.so.4": "libcurl4",
}
_RDMA_DEVICES = Path("/sys/class/infiniband")


def _problems(plane: DataPlaneConfig) -> Iterator[Problem]:
    mooncake = plane.mooncake_cfg
    there_gib = plane.num_storage_units * mooncake.segment_gib
    if plane.capacity_gib is not None and plane.capacity_gib > there_gib:
        yield Problem(
            key=f"data_plane.capacity_gib={plane.capacity_gib:g}",
            rule=(
                f"is more than the {there_gib:g} GiB of data_plane.num_storage_units="
                f"{plane.num_storage_units} x data_plane.mooncake_cfg.segment_gib={mooncake.segment_gib:g}"
            ),
            remedy="raise one of these two, or set capacity_gib to null",
        )
    if mooncake.rdma_devices is not None and mooncake.protocol is not MooncakeProtocol.rdma:
        yield Problem(
            key=f"data_plane.mooncake_cfg.rdma_devices={mooncake.rdma_devices}",
            rule=f"has no meaning with data_plane.mooncake_cfg.protocol={mooncake.protocol.value}",
            remedy="set it to null, or the protocol to rdma",
        )


def _machine_problems(plane: DataPlaneConfig) -> Iterator[Problem]:
    key = f"data_plane.backend={plane.backend}"
    if importlib.util.find_spec("mooncake") is None:
        yield Problem(
            key=key,
            rule="needs a Python package that is not installed",
            remedy="run scripts/setup.sh again, or pip install mooncake-transfer-engine-non-cuda",
        )
    lacking = missing_mooncake_libraries()
    if lacking:
        yield Problem(
            key=key,
            rule=f"needs system libraries that are not installed: {', '.join(lacking)}",
            remedy=(
                f"on Debian and Ubuntu: apt-get install {' '.join(lacking.values())}; "
                "or use data_plane.backend=simple"
            ),
        )
    if shutil.which("setpriv") is None:
        yield Problem(key=key, rule="needs the program setpriv", remedy="it is part of util-linux")
    yield from _mooncake_memory(plane)
    yield from _rdma_devices(plane.mooncake_cfg)


def missing_mooncake_libraries() -> dict[str, str]:
    """Return the libraries that Mooncake needs and this machine lacks, each with its Debian package."""
    return {name: package for name, package in _MOONCAKE_LIBRARIES.items() if not _can_load(name)}


def _can_load(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _mooncake_memory(plane: DataPlaneConfig) -> Iterator[Problem]:
    num_units, segment_gib = plane.num_storage_units, plane.mooncake_cfg.segment_gib
    memory_gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    if num_units * segment_gib > memory_gib:
        yield Problem(
            key=f"data_plane.mooncake_cfg.segment_gib={segment_gib:g}",
            rule=(
                f"times data_plane.num_storage_units={num_units} is more than this machine's "
                f"{memory_gib:.1f} GiB of memory"
            ),
            remedy=f"try at most {memory_gib / 2 / num_units:.1f}",
        )


def _rdma_devices(cfg: MooncakeConfig) -> Iterator[Problem]:
    if cfg.protocol is not MooncakeProtocol.rdma:
        return
    there = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    if not there:
        yield Problem(
            key="data_plane.mooncake_cfg.protocol=rdma",
            rule=f"needs an RDMA device, and {_RDMA_DEVICES} has none",
            remedy="use data_plane.mooncake_cfg.protocol=tcp",
        )
        return
    unknown = [name for name in (cfg.rdma_devices or "").split(",") if name and name not in there]
    if unknown:
        yield Problem(
            key=f"data_plane.mooncake_cfg.rdma_devices={cfg.rdma_devices}",
            rule=f"names {', '.join(unknown)}, which this machine does not have",
            remedy=f"it has {', '.join(there)}; null takes them all",
        )


KIND = StorageKind(
    about="Mooncake's segments in host memory, reached over TCP or RDMA",
    storage="nemo_like.data_plane.storage_start:mooncake_storage",
    store="nemo_like.data_plane.storage_start:transfer_queue_store",
    problems=_problems,
    machine_problems=_machine_problems,
)
