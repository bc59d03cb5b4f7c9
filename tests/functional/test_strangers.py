"""What others on the machine can reach of a run's Ray and data plane: ports that let nobody in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from nemo_like.batch.columns import ROLLOUT_COLUMNS, Column, Layout
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from nemo_like.config.schema import StorageBackend
from nemo_like.data_plane.storage_errors import CorruptData
from tests.functional.data_plane_fixtures import (
    MOONCAKE_MASTER,
    TransferQueuePlanes,
    data_plane_config,
    mooncake,
    started,
    storage_processes,
)
from tests.functional.runs import ROOT, attack, is_loopback
from tests.unit.data_plane.contract import ids, opened, put


def listening() -> dict[tuple[str, int], str]:
    """Addresses on which this process and those below it listen, with the names of the processes."""
    me = psutil.Process()
    names = {process.pid: process.name() for process in (me, *me.children(recursive=True))}
    return {
        (one.laddr.ip, one.laddr.port): names[one.pid]
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in names
    }


def round_trip(planes: TransferQueuePlanes) -> list[int]:
    meta = put(planes.client(), opened(planes))
    values: list[int] = planes.other_client().fetch(meta, ["input_ids"])["input_ids"].tolist()
    return values


@pytest.mark.slow
def test_every_port_is_on_loopback_and_unpickles_nothing_of_a_stranger(tmp_path: Path) -> None:
    before = listening()  # what other tests have opened in this process
    needs = RayNeeds(address=None, num_cpus=16, num_gpus=0, start_timeout_s=120)
    config = data_plane_config(StorageBackend.simple, timeout_s=20.0)
    with ray_runtime(needs, warn=print), started("run-strangers", config) as planes:
        assert round_trip(planes) == ids().tolist()
        addresses = {where: name for where, name in listening().items() if where not in before}
        assert any("TransferQueue" in name for name in addresses.values())
        assert all(is_loopback(address) for address, _ in addresses)
        ports = sorted({port for _, port in addresses})
        attack(ports, tmp_path)
        assert round_trip(planes) == ids().tolist()


# Reads a value in Mooncake, and puts a pickle in its place, in as many bytes and in TransferQueue's own form.
REPLACES = """
import os, pickle, sys
from mooncake.store import MooncakeDistributedStore
from transfer_queue.utils import serial_utils
from tests.functional.stranger import become_another_user

class Mark:
    def __reduce__(self):
        return os.mkdir, (sys.argv[3],)

become_another_user()
store = MooncakeDistributedStore()
assert store.setup(sys.argv[2], "P2PHANDSHAKE", 0, 16 << 20, "tcp", "", sys.argv[1]) == 0
key = next(f"{n}@own" for n in range(1000) if store.is_exist(f"{n}@own") == 1)
size = store.get_size(key)
(replacing,), _ = serial_utils.batch_encode_into([Mark()], lambda sizes: [memoryview(bytearray(size))])
assert store.remove(key, True) == 0 and store.put(key, bytes(replacing)) == 0
assert store.get(key) == bytes(replacing)
os._exit(0)
"""


@pytest.mark.parametrize("backend", [mooncake])
def test_what_a_stranger_writes_into_mooncake_is_refused(
    private_ray: None, backend: StorageBackend, tmp_path: Path
) -> None:
    others = storage_processes(MOONCAKE_MASTER)
    with started("run-mooncake-stranger", data_plane_config(backend, timeout_s=20.0)) as planes:
        (master,) = storage_processes(MOONCAKE_MASTER) - others
        options = dict(part[2:].split("=") for part in psutil.Process(master).cmdline() if "=" in part)
        host, port = options["rpc_address"], options["rpc_port"]
        own = Column("own", "", Layout.objects)
        planes.open("strangers", [*ROLLOUT_COLUMNS, own])
        meta = planes.client().put(
            "strangers",
            {"input_ids": ids((3,)), "own": [{"some": "text" * 100}]},
            lengths=(3,),
            chunk_sizes=(1,),
            tags={},
        )
        assert planes.other_client().fetch(meta, ["own"])["own"] == [{"some": "text" * 100}]
        tmp_path.chmod(0o777)
        stranger = [sys.executable, "-c", REPLACES, f"{host}:{port}", host, str(tmp_path / "mark")]
        subprocess.run(stranger, cwd=ROOT, check=True, timeout=60)
        planes.other_client().forget("strangers")
        with pytest.raises(CorruptData, match="Mooncake returned other bytes for"):
            planes.other_client().fetch(meta, ["own"])
        assert not list(tmp_path.iterdir())
