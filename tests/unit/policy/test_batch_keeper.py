"""What a worker keeps of a partition, and what becomes of what it writes in the background."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    POLICY_COLUMNS,
    PREV_LOGPROBS,
    RESPONSE_MASK,
    ROLLOUT_COLUMNS,
    Column,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import ADVANTAGE
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.storage_errors import DataPlaneError, StorageFailed
from nemo_like.policy.options import ReplicaFetch
from nemo_like.policy.workers.batch_keeper import BatchKeeper


class Alone:
    """A replica of one worker."""

    def agree(self, failure: DataPlaneError | None) -> None:
        if failure is not None:
            raise failure

    def share(self, columns: Sequence[Column], meta: KVBatchMeta, fetched: Any) -> Any:
        return fetched


class Plane(InMemoryDataPlane):
    """Notes what is fetched; its writes wait until they may go on, and may fail."""

    def __init__(self) -> None:
        super().__init__(timeout_s=5.0)
        self.fetched: list[list[str]] = []
        self.may_write = threading.Event()
        self.failure: DataPlaneError | None = None

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        self.fetched.append(list(columns))
        return super().fetch(meta, columns)

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        assert self.may_write.wait(5.0)
        if self.failure is not None:
            raise self.failure
        return super().write(meta, columns)


@pytest.fixture
def plane() -> Plane:
    return Plane()


@pytest.fixture
def keeper(plane: Plane) -> BatchKeeper:
    return BatchKeeper(plane, Alone(), ReplicaFetch.leader, torch.device("cpu"))  # type: ignore[arg-type]


def put(plane: Plane, partition: str) -> KVBatchMeta:
    plane.open_partition(partition, [*ROLLOUT_COLUMNS, *POLICY_COLUMNS])
    columns = {
        "input_ids": np.arange(5, dtype=np.int32),
        "response_mask": np.array([0, 1, 1, 0, 1], np.uint8),
        "generation_logprobs": np.full(5, -1.0, np.float32),
    }
    return plane.put(partition, columns, lengths=[3, 2], chunk_sizes=[2], tags={})


READS = (INPUT_IDS, RESPONSE_MASK)


def test_a_later_stage_has_the_same_batch_with_what_it_lacked_and_its_own_tags(
    plane: Plane, keeper: BatchKeeper
) -> None:
    meta = put(plane, "p")
    scored = keeper.batch(meta, READS)
    scored.add({PREV_LOGPROBS: torch.zeros(5)})
    trained = keeper.batch(meta.with_tag(ADVANTAGE, [1.0, 2.0]), (*READS, PREV_LOGPROBS, GENERATION_LOGPROBS))
    assert trained is scored
    assert plane.fetched == [["input_ids", "response_mask"], ["generation_logprobs"]]
    assert trained.sample_values["advantage"].tolist() == [1.0, 2.0]
    keeper.batch(meta, READS)
    assert len(plane.fetched) == 2


def test_other_samples_and_the_next_partition_are_another_batch(plane: Plane, keeper: BatchKeeper) -> None:
    meta = put(plane, "p")
    whole = keeper.batch(meta, READS)
    part = keeper.batch(meta.subset([1]), READS)
    assert (len(whole), len(part)) == (2, 1)
    keeper.finish("p")
    assert keeper.batch(meta, READS) is not part
    assert keeper.batch(put(plane, "q"), READS) is not whole


def test_what_is_written_is_on_its_way_while_the_caller_goes_on(plane: Plane, keeper: BatchKeeper) -> None:
    meta = put(plane, "p")
    keeper.batch(meta, READS)
    keeper.write(meta, {PREV_LOGPROBS: torch.arange(5.0)})
    plane.may_write.set()
    keeper.batch(meta, READS)
    reader = InMemoryDataPlane(plane.host, timeout_s=0.01)
    assert reader.fetch(meta, ["prev_logprobs"])["prev_logprobs"].tolist() == [0, 1, 2, 3, 4]


def test_what_could_not_be_written_fails_the_next_stage_once(plane: Plane, keeper: BatchKeeper) -> None:
    meta = put(plane, "p")
    plane.failure = StorageFailed("the storage is gone")
    plane.may_write.set()
    keeper.write(meta, {PREV_LOGPROBS: torch.zeros(5)})
    with pytest.raises(StorageFailed, match="the storage is gone"):
        keeper.batch(meta, READS)
    assert len(keeper.batch(meta, READS)) == 2


def test_a_step_that_is_given_up_leaves_nothing_under_way(plane: Plane, keeper: BatchKeeper) -> None:
    meta = put(plane, "p")
    kept = keeper.batch(meta, READS)
    plane.failure = StorageFailed("the storage is gone")
    keeper.write(meta, {PREV_LOGPROBS: torch.zeros(5)})
    threading.Timer(0.05, plane.may_write.set).start()
    keeper.abandon()
    assert plane.may_write.is_set()
    assert keeper.batch(meta, READS) is not kept


def test_no_samples_are_an_empty_batch_that_waits_for_the_write(plane: Plane, keeper: BatchKeeper) -> None:
    meta = put(plane, "p").with_tag(ADVANTAGE, [1.0, 2.0])
    keeper.batch(meta, READS)
    plane.fetched.clear()
    plane.may_write.set()
    keeper.write(meta, {PREV_LOGPROBS: torch.zeros(5)})
    nothing = keeper.batch(meta.subset([]), (*READS, PREV_LOGPROBS))
    assert (len(nothing), nothing.num_tokens, plane.fetched) == (0, 0, [])
    plane.failure = StorageFailed("the storage is gone")
    keeper.write(meta, {PREV_LOGPROBS: torch.zeros(5)})
    with pytest.raises(StorageFailed, match="the storage is gone"):
        keeper.batch(meta.subset([]), READS)
