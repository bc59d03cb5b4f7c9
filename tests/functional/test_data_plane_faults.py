"""Processes that die with bytes under way: errors that name them, in time, and nothing half-written.

And bytes that a stranger wrote.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest
import ray

from nemo_like.batch.columns import ROLLOUT_COLUMNS, Column, Layout
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.storage_errors import CapacityExceeded, CorruptData, DataPlaneError, StorageFailed
from tests.functional.data_plane_fixtures import (
    CONTROLLER,
    MOONCAKE_MASTER,
    MOONCAKE_UNIT_BYTES,
    STORAGE_UNIT,
    TransferQueuePlanes,
    data_plane_config,
    frozen,
    mooncake,
    remote_client,
    simple,
    started,
    storage_processes,
)
from tests.functional.runs import ROOT
from tests.unit.data_plane.contract import LENGTHS, ids, in_thread, opened, put

TIMEOUT_S = 20.0
# Several keys, more than sockets hold on their way.
LARGE = (1 << 20,) * 8

pytestmark = pytest.mark.usefixtures("private_ray")


@dataclass(frozen=True)
class Shared:
    """A run of several tests; ``processes`` are those of its storage."""

    backend: str
    planes: TransferQueuePlanes
    processes: set[int]


def put_large(planes: TransferQueuePlanes, partition: str) -> KVBatchMeta:
    return planes.client().put(
        partition, {"input_ids": ids(LARGE)}, lengths=LARGE, chunk_sizes=(1,) * len(LARGE), tags={}
    )


@contextmanager
def fails_naming(culprit: str, *actions: Callable[[], object]) -> Iterator[None]:
    """The actions are under way in the block, and end in time because of what it does."""
    running = [in_thread(action) for action in actions]
    time.sleep(0.5)
    assert [result for result, _ in running if result] == []
    began = time.monotonic()
    yield
    for result, thread in running:
        thread.join(TIMEOUT_S)
        assert isinstance(result[0], StorageFailed)
        assert culprit in str(result[0])
    assert time.monotonic() - began < TIMEOUT_S / 2


def assert_dead(planes: TransferQueuePlanes, partition: str, meta: KVBatchMeta, culprit: str) -> None:
    """Whatever one tries now, reading what was whole before included, says who died."""
    client, reader = planes.client(), planes.other_client()
    reader.forget(partition)
    for action in (
        lambda: put(client, partition),
        lambda: reader.fetch(meta, ["input_ids"]),
        lambda: client.clear(meta),
        lambda: planes.close(partition),
    ):
        with pytest.raises(DataPlaneError, match=culprit):
            action()


@pytest.mark.parametrize(
    "backend",
    [simple, pytest.param(*mooncake.values, marks=[*mooncake.marks, pytest.mark.slow], id=mooncake.id)],
)
def test_a_storage_unit_that_dies_during_a_put_and_a_get(backend: str) -> None:
    others = storage_processes(STORAGE_UNIT[backend])
    with started("run-unit", data_plane_config(backend, timeout_s=TIMEOUT_S, num_units=2)) as planes:
        unit, _ = storage_processes(STORAGE_UNIT[backend]) - others
        partition = opened(planes)
        whole = put_large(planes, partition)
        with (
            frozen(unit),
            fails_naming(
                "storage unit",
                lambda: put_large(planes, partition),
                lambda: planes.other_client().fetch(whole, ["input_ids"]),
            ),
        ):
            os.kill(unit, signal.SIGKILL)
        assert_dead(planes, partition, whole, r"storage unit \d died")


def test_a_controller_that_dies_during_a_put_and_then_the_host() -> None:
    others = storage_processes(CONTROLLER)
    with started("run-controller", data_plane_config("simple", timeout_s=TIMEOUT_S)) as planes:
        (controller,) = storage_processes(CONTROLLER) - others
        client, partition = planes.client(), opened(planes)
        meta = put(client, partition)
        logprobs = np.zeros(sum(LENGTHS), np.float32)
        with (
            frozen(controller),
            fails_naming("controller died", lambda: client.write(meta, {"prev_logprobs": logprobs})),
        ):
            os.kill(controller, signal.SIGKILL)
        planes.host.kill()
        client.forget(partition)
        with pytest.raises(StorageFailed, match="died"):
            client.fetch(meta, ["input_ids"])


@pytest.fixture(
    scope="module",
    params=[mooncake, pytest.param("simple", marks=pytest.mark.slow, id="simple")],
)
def shared(private_ray: None, request: pytest.FixtureRequest) -> Iterator[Shared]:
    """One run for the tests that leave it as it was; the last of Mooncake's ends it."""
    backend: str = request.param
    names = (CONTROLLER, STORAGE_UNIT[backend], MOONCAKE_MASTER)
    others = storage_processes(*names)
    with started("run-shared", data_plane_config(backend, timeout_s=TIMEOUT_S)) as planes:
        yield Shared(backend, planes, storage_processes(*names) - others)


def test_writers_that_die_lose_nothing_stored_and_leave_nothing_half_written(shared: Shared) -> None:
    planes, partition = shared.planes, opened(shared.planes)
    (unit,) = storage_processes(STORAGE_UNIT[shared.backend]) & shared.processes
    writer = remote_client(planes.spec)
    columns = {"input_ids": ids(LARGE)}
    meta = writer.submit("put", partition, columns, LARGE).result(60)
    with frozen(unit):
        unfinished = writer.submit("put", partition, columns, LARGE)
        ready, _ = ray.wait([unfinished.ref], timeout=0.5)
        assert not ready
        writer.kill()
    got = planes.client().fetch(meta, ["input_ids"])["input_ids"]
    np.testing.assert_array_equal(got, columns["input_ids"])
    planes.close(partition)
    assert planes.num_stored_keys() == 0


def test_two_jobs_with_the_same_names_share_a_cluster_and_one_crashes(shared: Shared) -> None:
    planes = shared.planes
    names = (CONTROLLER, STORAGE_UNIT[shared.backend], MOONCAKE_MASTER)
    others = storage_processes(*names)
    planes.open("train-1", ROLLOUT_COLUMNS)
    command = [sys.executable, "-m", "tests.functional.hanging_driver"]
    command += [ray.get_runtime_context().gcs_address, shared.backend, "run-shared"]
    driver = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "stored\n"
        theirs = [psutil.Process(pid) for pid in storage_processes(*names) - others]
        assert len(theirs) == (3 if shared.backend == "mooncake_cpu" else 2)
        assert planes.num_stored_keys() == 0
        meta = put(planes.client(), "train-1")
        driver.kill()
        _, alive = psutil.wait_procs(theirs, timeout=30)
        assert not alive
        got = planes.other_client().fetch(meta, ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, ids())
        planes.close("train-1")
        assert planes.num_stored_keys() == 0
    finally:
        driver.kill()
        driver.wait()


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


@pytest.mark.parametrize("shared", [mooncake], indirect=True)
def test_what_a_stranger_writes_into_mooncake_is_refused(shared: Shared, tmp_path: Path) -> None:
    planes = shared.planes
    (master,) = storage_processes(MOONCAKE_MASTER) & shared.processes
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
    planes.close("strangers")
    assert planes.num_stored_keys() == 0


@pytest.mark.parametrize("shared", [mooncake], indirect=True)
def test_a_full_mooncake_keeps_nothing_of_the_write_and_its_master_dies(shared: Shared) -> None:
    """The last of its run, which it ends."""
    planes = shared.planes
    (master,) = storage_processes(MOONCAKE_MASTER) & shared.processes
    client, partition = planes.client(), opened(planes)
    meta = put(client, partition)
    before = planes.num_stored_keys()
    half = MOONCAKE_UNIT_BYTES // 8
    for _ in range(2):
        with pytest.raises(CapacityExceeded, match="no room for the write") as raised:
            lengths = (half,) * 3
            client.put(
                partition, {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=(1, 1, 1), tags={}
            )
        assert "data_plane.mooncake_cfg.segment_gib" in str(raised.value)
        assert planes.num_stored_keys() == before
    lengths = (half,)
    large = client.put(partition, {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=(1,), tags={})
    np.testing.assert_array_equal(
        planes.other_client().fetch(large, ["input_ids"])["input_ids"], ids(lengths)
    )
    with (
        frozen(master),
        fails_naming(
            "mooncake_master died",
            lambda: put(client, partition),
            lambda: planes.other_client().fetch(meta, ["input_ids"]),
        ),
    ):
        os.kill(master, signal.SIGKILL)
    assert_dead(planes, partition, meta, "mooncake_master died")
