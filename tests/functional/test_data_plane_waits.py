"""Waits for a data plane: until a consumer closes a partition, and for a process that is stopped."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.cluster.actor_errors import StageTimeout
from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.storage_errors import TooManyPartitions
from tests.functional.data_plane_fixtures import TransferQueuePlanes, data_plane_config
from tests.unit.data_plane.contract import in_thread, put

pytestmark = pytest.mark.usefixtures("private_ray", "nobody_dies")


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="module")
def cluster(private_ray: None, logs: Path) -> Iterator[Cluster]:
    cluster = Cluster(report_directory=logs)
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def planes(cluster: Cluster, logs: Path) -> TransferQueuePlanes:
    cfg = data_plane_config("simple", timeout_s=2.0, max_open_partitions=2)
    planes = TransferQueuePlanes("waits", cfg, cluster.start, str(logs / "data_plane.log"))
    planes.start()
    return planes


def test_a_producer_ahead_of_its_consumers_waits_until_a_partition_is_closed(
    planes: TransferQueuePlanes,
) -> None:
    for name in ("train-1", "train-2"):
        planes.open(name, ROLLOUT_COLUMNS)
    result, waiting = in_thread(lambda: planes.open("train-3", ROLLOUT_COLUMNS))
    time.sleep(0.2)
    assert not result
    planes.close("train-1")
    waiting.join(planes.timeout_s / 2)
    assert result == [None]
    with pytest.raises(
        TooManyPartitions,
        match=r"'train-4' could not be opened within 2 s: data_plane.max_open_partitions=2 are open, "
        r"'train-2' for \d+\.\d s, 'train-3' for \d+\.\d s",
    ):
        planes.open("train-4", ROLLOUT_COLUMNS)
    planes.close("train-2")
    planes.close("train-3")


def test_a_stopped_process_of_the_storage_is_named(
    cluster: Cluster, planes: TransferQueuePlanes, logs: Path
) -> None:
    """It is no actor of the cluster's: the data plane's host started it. Last, since it ends the run."""
    unit = next(
        process
        for pid in psutil.pids()
        if stderr_of(pid) == str(logs / "data_plane" / "storage-unit-0.log")
        for process in [psutil.Process(pid)]
    )
    planes.open("p", ROLLOUT_COLUMNS)
    client = planes.client()
    put(client, "p")
    # When it is collected as garbage instead, it may wait forever for a connection to what has ended.
    client.close()
    unit.suspend()
    while unit.status() != psutil.STATUS_STOPPED:  # until then it may answer
        threading.Event().wait(0.01)
    with pytest.raises(StageTimeout) as caught:
        cluster.gather([planes.host.submit("close_partition", "p")], stage="closing", timeout_s=60)
    assert f"data_plane-waits's storage-unit-0 (process {unit.pid}, stopped): " in str(caught.value)
    cluster.stop()
    unit.wait(timeout=20)


def stderr_of(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return ""
