"""What others on the machine can reach of a run's Ray and data plane: ports that let nobody in.

What they can write into Mooncake is in ``test_data_plane_faults.py``, which has one that runs.
"""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from tests.functional.data_plane_fixtures import (
    TransferQueuePlanes,
    data_plane_config,
    started,
)
from tests.functional.runs import attack, is_loopback
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
    config = data_plane_config("simple", timeout_s=20.0)
    with ray_runtime(needs, warn=print), started("run-strangers", config) as planes:
        assert round_trip(planes) == ids().tolist()
        addresses = {where: name for where, name in listening().items() if where not in before}
        assert any("TransferQueue" in name for name in addresses.values())
        assert all(is_loopback(address) for address, _ in addresses)
        ports = sorted({port for _, port in addresses})
        attack(ports, tmp_path)
        assert round_trip(planes) == ids().tolist()
