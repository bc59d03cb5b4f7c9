"""The data plane over a real TransferQueue: the contract on each backend, silent failures made loud."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from nemo_like.batch.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.host import start_host
from nemo_like.data_plane.partition_control import PartitionControl
from nemo_like.data_plane.segments import PartitionInfo, Segment, Want
from nemo_like.data_plane.storage_errors import (
    CorruptData,
    StorageFailed,
    UnknownPartition,
    UnknownSamples,
)
from tests.functional.data_plane_fixtures import (
    START_TIMEOUT_S,
    TransferQueuePlanes,
    data_plane_config,
    mooncake,
    remote_client,
    simple,
)
from tests.unit.data_plane.contract import (
    LENGTHS,
    DataPlaneContract,
    ids,
    opened,
    put,
    rows_of,
)


@pytest.fixture(scope="module", params=[simple, mooncake])
def planes(private_ray: None, request: pytest.FixtureRequest) -> Iterator[TransferQueuePlanes]:
    cfg = data_plane_config(request.param, timeout_s=6.0, num_units=2, capacity_bytes=12 << 20)
    planes = TransferQueuePlanes(f"run-a-{request.param}", cfg)
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
        info, segments = located(planes, partition, meta)
        planes.call("discard", partition, info.storage_id, segments)
        planes.call("settled")
        with pytest.raises(StorageFailed, match="get failed: "):
            planes.other_client().fetch(meta, ["input_ids"])

    def test_values_of_another_dtype_than_were_put(self, planes: TransferQueuePlanes) -> None:
        """As when someone writes around the data plane."""
        partition = opened(planes)
        meta = put(planes.client(), partition)
        _, (segment, *_) = located(planes, partition, meta)
        for wrong in (np.zeros(15, np.float64), np.zeros(14, np.int32)):
            planes.client()._store.save([segment], {"input_ids": [wrong]}, 10.0)
            # Mooncake already refuses to read an object that is larger than it was.
            with pytest.raises((CorruptData, StorageFailed)):
                planes.other_client().fetch(meta, ["input_ids"])

    def test_duplicate_keys(self, planes: TransferQueuePlanes) -> None:
        meta = put(planes.client(), opened(planes))
        with pytest.raises(ValueError, match="occurs twice"):
            meta.subset([0, 1, 0])

    def test_a_worker_that_disconnects_takes_nothing_down(self, planes: TransferQueuePlanes) -> None:
        meta = put(planes.client(), opened(planes))
        reader = remote_client(planes.spec)
        got = reader.submit("fetch", meta, ["input_ids"]).result(60)["input_ids"]
        np.testing.assert_array_equal(got, ids())
        reader.submit("disconnect").result(10)
        reader.kill()
        again = put(planes.client(), opened(planes))
        np.testing.assert_array_equal(planes.other_client().fetch(again, ["input_ids"])["input_ids"], ids())

    def test_more_processes_than_cpus(self, private_ray: None) -> None:
        """By a host in this process, as it does not get as far as to need one of its own."""
        cfg = data_plane_config("simple", timeout_s=5.0, num_units=40)

        async def start() -> None:
            host = start_host(cfg=cfg, run_id="run-crowded", start_timeout_s=START_TIMEOUT_S, log_path=None)
            try:
                await host.ready()
            finally:
                await host.stop()

        with pytest.raises(
            StorageFailed, match=r"num_storage_units=40 units need 41 CPUs; the cluster has 16"
        ):
            asyncio.run(start())


def located(
    planes: TransferQueuePlanes, partition: str, meta: KVBatchMeta
) -> tuple[PartitionInfo, list[Segment]]:
    """The partition, and the segments that hold the batch's input_ids."""
    wants = [Want(("input_ids",), tuple((chunk.key, None) for chunk in meta.chunks))]
    return planes.call("locate", partition, None, wants, 1.0)


class TestSeveralKeysAndUnits:
    """Chunks large enough to be keys of their own, spread over two storage units."""

    def test_many_large_chunks_come_back_in_any_order(self, planes: TransferQueuePlanes) -> None:
        chunk_tokens = 32 << 10
        lengths = [chunk_tokens // 2, chunk_tokens - chunk_tokens // 2] * 6
        meta = planes.client().put(
            opened(planes), {"input_ids": ids(lengths)}, lengths=lengths, chunk_sizes=[2] * 6, tags={}
        )
        order = [11, 2, 3, 0, 7, 6, 5]
        got = planes.other_client().fetch(meta.subset(order), ["input_ids"])["input_ids"]
        np.testing.assert_array_equal(got, rows_of(ids(lengths), lengths, order))

    def test_a_chunk_is_a_key_where_it_may_be_dropped_and_a_rank_where_the_ranks_are_known(
        self, planes: TransferQueuePlanes
    ) -> None:
        before = planes.num_stored_keys()
        put(planes.client(), opened(planes))
        assert planes.num_stored_keys() == before + 3
        planes.open("shared", (*ROLLOUT_COLUMNS, *POLICY_COLUMNS), num_readers=1)
        meta = put(planes.client(), "shared")
        assert planes.num_stored_keys() == before + 4
        reader = planes.other_client()
        reader.write(meta, {"prev_logprobs": np.ones(sum(LENGTHS), np.float32)})
        assert planes.num_stored_keys() == before + 5
        reader.forget("shared")
        np.testing.assert_array_equal(reader.fetch(meta, ["prev_logprobs"])["prev_logprobs"], 1)
        planes.close("shared")

    def test_the_controller_hears_of_columns_only_where_it_frees_keys_by_them(
        self, planes: TransferQueuePlanes
    ) -> None:
        partition = opened(planes)
        meta = put(planes.client(), partition)
        info, segments = located(planes, partition, meta)
        store = planes.client()._store
        asking = store._client.async_kv_retrieve_meta([segment.key for segment in segments], info.storage_id)
        known = store._finish(asking, "look", planes.timeout_s)
        assert len(known) == len(segments)
        has_mooncake = planes.spec.backend == "mooncake_cpu"
        assert ("input_ids" in known.field_names) == has_mooncake

    def test_a_process_keeps_its_number_of_threads(self, planes: TransferQueuePlanes) -> None:
        """TransferQueue's own client sets it for the process in every put and get."""
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            meta = put(planes.client(), opened(planes))
            planes.other_client().fetch(meta, ["input_ids"])
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)


def test_the_drivers_partitions_are_dropped_on_exit_also_when_the_block_raised(
    planes: TransferQueuePlanes,
) -> None:
    control = PartitionControl(
        Cluster(), planes.host, columns=ROLLOUT_COLUMNS, num_readers=None, timeout_s=30.0
    )
    before = planes.num_stored_keys()
    with control.partition("train-7") as partition:
        meta = put(planes.client(), partition)
        assert planes.num_stored_keys() == before + 3
    with pytest.raises(KeyError, match="a stage"), control.partition("train-8"):
        with pytest.raises(UnknownPartition):
            planes.other_client().fetch(meta, ["input_ids"])
        put(planes.client(), "train-8")
        raise KeyError("a stage")
    with control.partition("train-9"):
        assert planes.num_stored_keys() == before
