"""Mooncake's processes: the master, which knows where values are, and the storage units that hold them.

Only the units lend memory, and the capacity is what they lend. A process that connects lends none, so no
value dies with a worker. The master runs on a free port as a child of the run's host, and dies with it.
Several runs can thus share a machine: no process is found or killed by its name.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
from pathlib import Path
from typing import Any

import psutil
import ray
from tenacity import AsyncRetrying, retry_if_result, wait_exponential

from nemo_like.cluster.runtime import free_port
from nemo_like.data_plane.options import MooncakeConfig
from nemo_like.data_plane.storage_errors import StorageFailed
from nemo_like.observability.exits import how_it_ended

# How often to try a start: another process may take the port that was free a moment ago.
_NUM_ATTEMPTS = 3
# For a unit's own transfers, of which it makes none.
_UNIT_BUFFER_BYTES = 16 << 20
# The processes exchange addresses among themselves, without a metadata server.
_METADATA_SERVER = "P2PHANDSHAKE"


def environment(node_address: str) -> dict[str, str]:
    """Return the environment variables that Mooncake reads when a process of this node connects."""
    return {
        # Other processes look for this one at its node's address, so it must listen there, not on loopback.
        "MC_TCP_BIND_ADDRESS": node_address,
    }


def client_settings(cfg: MooncakeConfig, master_address: str) -> dict[str, Any]:
    """Return TransferQueue's configuration of a process that connects.

    An empty string lets Mooncake find out.
    """
    return {
        "metadata_server": _METADATA_SERVER,
        "master_server_address": master_address,
        "local_hostname": "",
        "protocol": cfg.protocol.value,
        "device_name": cfg.rdma_devices or "",
        "global_segment_size": 0,
        "local_buffer_size": cfg.buffer_mib << 20,
    }


class Master:
    """Mooncake's master, the program ``mooncake_master``, as a child process."""

    def __init__(self, cfg: MooncakeConfig, node_address: str) -> None:
        self._cfg = cfg
        self._node_address = node_address
        self._process: subprocess.Popen[bytes] | None = None

    async def start(self) -> str:
        """Start the master, wait until it listens and return its address.

        Raises StorageFailed when it ends instead.
        """
        for _ in range(_NUM_ATTEMPTS):
            port = self._cfg.master_port or free_port()
            self._process = process = self._spawn(port)
            if await _listens(process, port):
                return f"{self._node_address}:{port}"
            if self._cfg.master_port is not None:
                break
        raise StorageFailed(
            f"mooncake_master ended with {how_it_ended(process.returncode)} instead of listening on "
            f"{self._node_address}:{port}; the log of the data plane's host says why. Choose another "
            "data_plane.mooncake_cfg.master_port, or null for a free one"
        )

    async def ended(self) -> int:
        """Wait until the master ends, and return its exit code."""
        assert self._process is not None
        return await asyncio.to_thread(self._process.wait)

    def stop(self) -> None:
        """Kill the master and wait for its end; safe to call twice."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _spawn(self, port: int) -> subprocess.Popen[bytes]:
        options = {
            "rpc_address": self._node_address,
            "rpc_port": port,
            "metrics_host": self._node_address,
            "metrics_port": 0,
            "enable_metric_reporting": "false",
            "eviction_high_watermark_ratio": 1.0,
            "eviction_ratio": 0.0,
            "allow_evict_soft_pinned_objects": "false",
            "client_ttl": 60,
        }
        # The kernel ends the master when its parent dies, however it dies.
        return subprocess.Popen(
            [
                "setpriv",
                "--pdeathsig=KILL",
                str(master_program()),
                *(f"--{name}={value}" for name, value in options.items()),
            ],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "GLOG_minloglevel": "1", "GLOG_logtostderr": "1"},
        )


def master_program() -> Path:
    """Return the master's program in Mooncake's package.

    Raises StorageFailed when the package is not installed.
    """
    package = importlib.util.find_spec("mooncake")
    if package is None or not package.submodule_search_locations:
        raise StorageFailed("data_plane.backend=mooncake_cpu needs the package mooncake-transfer-engine")
    return Path(package.submodule_search_locations[0]) / "mooncake_master"


async def _listens(process: subprocess.Popen[bytes], port: int) -> bool:
    """Wait until this very process listens on ``port`` and return True; return False when it has ended.

    The wait has no deadline of its own: the caller's deadline for the storage's start ends it.
    """

    async def listens() -> bool | None:
        if process.poll() is not None:
            return False
        connections = psutil.Process(process.pid).net_connections(kind="tcp")
        return any(one.status == psutil.CONN_LISTEN and one.laddr.port == port for one in connections) or None

    # The master tells nobody when it is ready.
    attempts = AsyncRetrying(
        retry=retry_if_result(lambda answer: answer is None),
        wait=wait_exponential(multiplier=0.005, max=0.2),
    )
    return bool(await attempts(listens))


class MooncakeStorageUnit:
    """An actor that lends its memory to the store."""

    def __init__(self, cfg: MooncakeConfig, master_address: str) -> None:
        self._cfg = cfg
        self._master_address = master_address
        self._store: Any = None

    def mount(self) -> None:
        """Connect to the master and lend it memory. Raises StorageFailed when this fails."""
        node_address = ray.util.get_node_ip_address()
        os.environ.update(environment(node_address))
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        code = self._store.setup(
            node_address,
            _METADATA_SERVER,
            int(self._cfg.segment_gib * 2**30),
            _UNIT_BUFFER_BYTES,
            self._cfg.protocol.value,
            self._cfg.rdma_devices or "",
            self._master_address,
        )
        if code != 0:
            raise StorageFailed(
                f"a Mooncake storage unit on {node_address} could not lend "
                f"data_plane.mooncake_cfg.segment_gib={self._cfg.segment_gib:g} over "
                f"protocol={self._cfg.protocol.value} (Mooncake's error {code})"
            )
