"""The data plane over a real TransferQueue: the contract, silent failures made loud, deaths."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pytest
import ray

from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.client import SEGMENT_BYTES
from nemo_like.data_plane.columns import ROLLOUT_COLUMNS
from nemo_like.data_plane.errors import (
    CorruptData,
    DataPlaneError,
    MissingData,
    StorageFailed,
    UnknownColumn,
    UnknownPartition,
    UnknownSamples,
)
from nemo_like.data_plane.handle import PartitionControl
from nemo_like.data_plane.meta import Chunk, KVBatchMeta
from tests.functional.data_plane_fixtures import TransferQueuePlanes, ray_processes, remote_reader
from tests.unit.data_plane.contract import (
    LENGTHS,
    DataPlaneContract,
    ids,
    in_thread,
    opened,
    put,
    rows_of,
)


@pytest.fixture(scope="module")
def private_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=16, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def planes(private_ray: None) -> Iterator[TransferQueuePlanes]:
    planes = TransferQueuePlanes("run-a", timeout_s=4.0, num_units=2)
    planes.start()
    yield planes
    planes.stop()


class TestTransferQueue(DataPlaneContract):
    pass


class TestSilentFailuresAreLoud:
    """What TransferQueue passes over without a word, or answers with something else."""

    def test_a_get_with_one_unknown_key(self, planes: TransferQueuePlanes) -> None:
        meta = put(planes.client(), opened(planes))
        invented = KVBatchMeta(
            partition=meta.partition,
            chunks=(*meta.chunks, Chunk("1.999999", (3,))),
            rows=(*meta.rows, (3, 0)),
            columns=meta.columns,
        )
        with pytest.raises(UnknownSamples, match=r"has no chunk '1\.999999'"):
            planes.other_client().fetch(invented, ["input_ids"])

    def test_a_key_that_vanished_from_the_storage(self, planes: TransferQueuePlanes) -> None:
        partition = opened(planes)
        meta = put(planes.client(), partition)
        session = planes.client()._session
        (storage_id,) = [
            name
            for name in session.start(session._client.async_get_partition_list()).result(10)
            if f"/{partition}/" in name
        ]
        keys = list(session.start(session._client.async_kv_list(storage_id)).result(10)[storage_id])
        session.start(session.drop(storage_id, keys)).result(10)
        with pytest.raises(StorageFailed, match=rf"partition '{partition}': get failed: .*not found"):
            planes.other_client().fetch(meta, ["input_ids"])

    def test_a_get_with_a_column_that_is_unknown_or_there_for_some_rows_only(
        self, planes: TransferQueuePlanes
    ) -> None:
        client = planes.client()
        meta = put(client, opened(planes))
        client.write(meta.subset([0, 1]), {"prev_logprobs": np.zeros(4, np.float32)})
        with pytest.raises(UnknownColumn):
            planes.other_client().fetch(meta, ["input_ids", "typo"])
        with pytest.raises(MissingData, match="'prev_logprobs'"):
            planes.other_client().fetch(meta, ["input_ids", "prev_logprobs"])

    def test_values_of_another_dtype_than_were_put(self, planes: TransferQueuePlanes) -> None:
        """As when someone writes around the data plane."""
        partition = opened(planes)
        meta = put(planes.client(), partition)
        session = planes.client()._session
        (segment,) = session.start(
            session.ask("locate", *described(planes, partition), whole(meta), 1.0)
        ).result(10)
        storage_id = described(planes, partition)[1]
        for wrong in (np.zeros(15, np.float64), np.zeros(14, np.int32)):
            session.start(session.save(storage_id, [segment.key], {"input_ids": [wrong]})).result(10)
            with pytest.raises(CorruptData, match=f"column 'input_ids', segment '{segment.key}'"):
                planes.other_client().fetch(meta, ["input_ids"])

    def test_duplicate_keys(self, planes: TransferQueuePlanes) -> None:
        meta = put(planes.client(), opened(planes))
        with pytest.raises(ValueError, match="occurs twice"):
            meta.subset([0, 1, 0])

    def test_a_worker_that_disconnects_takes_nothing_down(self, planes: TransferQueuePlanes) -> None:
        meta = put(planes.client(), opened(planes))
        reader = remote_reader(planes.spec)
        got = reader.submit("fetch", meta, ["input_ids"]).result(60)["input_ids"]
        np.testing.assert_array_equal(got, ids())
        reader.submit("disconnect").result(10)
        reader.kill()
        again = put(planes.client(), opened(planes))
        np.testing.assert_array_equal(planes.other_client().fetch(again, ["input_ids"])["input_ids"], ids())

    def test_more_processes_than_cpus(self, private_ray: None) -> None:
        crowded = TransferQueuePlanes("run-crowded", timeout_s=5.0, num_units=40)
        with pytest.raises(
            StorageFailed, match=r"num_storage_units=40 units need 41 CPUs; the cluster has 16"
        ):
            crowded.start()
        crowded.stop()


def described(planes: TransferQueuePlanes, partition: str) -> tuple[str, str]:
    session = planes.client()._session
    info = session.start(session.ask("describe", partition)).result(10)
    return info.name, info.storage_id


def whole(meta: KVBatchMeta) -> list[tuple[tuple[str, ...], tuple[tuple[str, None], ...]]]:
    from nemo_like.data_plane.segments import Want

    return [Want(("input_ids",), tuple((chunk.key, None) for chunk in meta.chunks))]


class TestSeveralKeysAndUnits:
    """Chunks large enough to be keys of their own, spread over two storage units."""

    def test_many_large_chunks_come_back_in_any_order(self, planes: TransferQueuePlanes) -> None:
        chunk_tokens = SEGMENT_BYTES // 4
        lengths = [chunk_tokens // 2, chunk_tokens - chunk_tokens // 2] * 6
        meta = planes.client().put(
            opened(planes), {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=[2] * 6, tags={}
        )
        order = [11, 2, 3, 0, 7, 6, 5]
        got = planes.other_client().fetch(meta.subset(order), ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, rows_of(ids(lengths), lengths, order))

    def test_small_chunks_share_a_key(self, planes: TransferQueuePlanes) -> None:
        before = planes.num_stored_keys()
        put(planes.client(), opened(planes))
        assert planes.num_stored_keys() == before + 1


def test_the_drivers_partitions_are_dropped_on_exit_also_when_the_block_raised(
    planes: TransferQueuePlanes,
) -> None:
    control = PartitionControl(Cluster(), planes.host, columns=ROLLOUT_COLUMNS, timeout_s=30.0)
    before = planes.num_stored_keys()
    with control.partition("train-7") as partition:
        meta = put(planes.client(), partition)
        assert planes.num_stored_keys() == before + 1
    with pytest.raises(KeyError, match="a stage"), control.partition("train-8"):
        with pytest.raises(UnknownPartition):
            planes.other_client().fetch(meta, ["input_ids"])
        put(planes.client(), "train-8")
        raise KeyError("a stage")
    with control.partition("train-9"):
        assert planes.num_stored_keys() == before


def test_two_runs_on_one_ray_do_not_see_each_other(planes: TransferQueuePlanes) -> None:
    """Same partition name, each with a TransferQueue of its own; the death of one leaves the other."""
    units = ray_processes("SimpleStorageUnit")
    other = TransferQueuePlanes("run-b", timeout_s=20.0)
    other.start()
    mine, theirs = planes.client(), other.client()
    planes.open("train-1", ROLLOUT_COLUMNS)
    other.open("train-1", ROLLOUT_COLUMNS)
    my_meta = put(mine, "train-1")
    their_meta = put(theirs, "train-1", lengths=(1, 1, 1, 1, 1, 1))
    assert other.num_stored_keys() == 1
    (unit,) = ray_processes("SimpleStorageUnit") - units
    result, waiting = in_thread(lambda: theirs.fetch(their_meta, ["response_mask"]))
    killed = time.monotonic()
    os.kill(unit, signal.SIGKILL)
    waiting.join(15)
    assert isinstance(result[0], StorageFailed)
    assert "storage unit 0 died" in str(result[0])
    for action in (
        lambda: put(theirs, "train-1"),
        lambda: other.other_client().fetch(their_meta, ["input_ids"]),
        lambda: theirs.clear(their_meta),
    ):
        with pytest.raises(StorageFailed, match="storage unit 0 died"):
            action()
    with pytest.raises(DataPlaneError, match="storage unit 0 died"):
        other.close("train-1")
    assert time.monotonic() - killed < 15
    np.testing.assert_array_equal(planes.other_client().fetch(my_meta, ["input_ids"])["input_ids"], ids())
    planes.close("train-1")
    other.stop()


def test_the_death_of_the_controller_or_the_host_is_named(planes: TransferQueuePlanes) -> None:
    controllers = ray_processes("TransferQueueController")
    other = TransferQueuePlanes("run-c", timeout_s=20.0)
    other.start()
    client = other.client()
    meta = put(client, opened(other))
    (controller,) = ray_processes("TransferQueueController") - controllers
    os.kill(controller, signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(StorageFailed, match=r"TransferQueue's controller died"):
        client.write(meta, {"prev_logprobs": np.zeros(sum(LENGTHS), np.float32)})
    assert time.monotonic() - started < 15
    other.host.kill()
    client.forget(meta.partition)
    with pytest.raises(StorageFailed, match="died"):
        client.fetch(meta, ["input_ids"])
    client.close()
