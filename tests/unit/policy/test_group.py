"""What the group does with metadata and answers, without processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.batch.columns import POLICY_COLUMNS
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.config.schema import Config
from nemo_like.policy.group import PolicyWorkerGroup, awaited_of, gathered_tags, with_epochs
from nemo_like.policy.parallelism import parallel_layout
from nemo_like.policy.results import WorkerScores


def batch_of(lengths: list[int]) -> KVBatchMeta:
    half = len(lengths) // 2
    chunks = (Chunk("a", tuple(lengths[:half])), Chunk("b", tuple(lengths[half:])))
    return KVBatchMeta(
        partition="train-1",
        chunks=chunks,
        rows=tuple((index, row) for index, chunk in enumerate(chunks) for row in range(len(chunk.lengths))),
        columns=frozenset(),
        tags={"sample_mask": (1.0,) * len(lengths), "num_response_tokens": (1,) * len(lengths)},
    )


class Worker:
    """Gets its calls through pickling; its answer's error of sample i is i, by the sample's id."""

    name = "policy"

    def __init__(self, place: Coordinates) -> None:
        self.place = place
        self.shards: list[KVBatchMeta] = []

    def submit(self, method: str, *args: Any) -> WorkerScores | None:
        shard, *_ = pickle.loads(pickle.dumps(args))
        self.shards.append(shard)
        if not self.place.is_leader:
            return None
        errors = [float(sample.rpartition("/")[2]) for sample in shard.sample_ids]
        return WorkerScores({"mult_prob_error": errors}, {}, compute_s=float(self.place.dp))


class Answers:
    """A cluster whose calls are their results."""

    def gather(self, calls: Sequence[Any], **_: Any) -> list[Any]:
        return list(calls)


def test_a_shard_is_pickled_once_for_all_workers_of_its_replica(
    demo: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two replicas of four workers each; the samples of chunk a are numbered 0 to 3, as are those of b."""
    cfg = demo(
        "policy.data_parallel_size=2",
        "policy.megatron_cfg.tensor_model_parallel_size=2",
        "policy.megatron_cfg.pipeline_model_parallel_size=2",
        "policy.train_global_batch_size=4",
        "policy.sequence_packing.share_prompts=false",
    ).policy
    layout = parallel_layout(cfg)
    workers = [Worker(layout.coordinates(rank)) for rank in range(8)]
    group = PolicyWorkerGroup(workers, Answers(), layout, cfg, num_epochs=1, deadline_s=lambda stage: 1.0)
    pickled: list[KVBatchMeta] = []
    reduce = KVBatchMeta.__reduce__

    def counted(meta: KVBatchMeta) -> tuple[Any, ...]:
        pickled.append(meta)
        return reduce(meta)

    monkeypatch.setattr(KVBatchMeta, "__reduce__", counted)
    scored = group.compute_logprobs(batch_of([4] * 8), POLICY_COLUMNS)
    assert [len(shard) for shard in pickled] == [4, 4]
    for replica in (0, 1):
        received = [worker.shards for worker in workers if worker.place.dp == replica]
        assert len(received) == 4
        assert all(shards == received[0] for shards in received)
        assert received[0] == [pickled[replica]]
    assert scored.batch.tags["mult_prob_error"] == (0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0)
    assert scored.compute_s == 1.0


@given(
    lengths=st.lists(st.integers(2, 30), min_size=8, max_size=8),
    num_shards=st.sampled_from([1, 2, 4]),
    global_batch_size=st.sampled_from([4, 8]),
)
def test_tags_come_back_in_the_order_of_the_whole_batch_whatever_the_sharding(
    lengths: list[int], num_shards: int, global_batch_size: int
) -> None:
    batch = batch_of(lengths)
    number = {sample: float(index) for index, sample in enumerate(batch.sample_ids)}
    shards = shard_for_logprobs(
        batch, num_shards=num_shards, global_batch_size=global_batch_size, micro_batch_size=2
    )
    answers = [
        WorkerScores({"error": [number[sample] for sample in shard.sample_ids]}, {}, 0.0) for shard in shards
    ]
    assert gathered_tags(batch, shards, answers) == {"error": [float(index) for index in range(8)]}


def test_epochs_repeat_every_update_in_order_on_the_same_rows() -> None:
    batch = batch_of([4] * 8)
    shards = shard_for_training(batch, num_shards=2, global_batch_size=4, micro_batch_size=1)
    for shard in shards:
        once, twice = shard.schedule, with_epochs(shard, 2).schedule
        assert once is not None
        assert twice is not None
        assert len(once.global_batches) == 2
        assert twice.global_batches == (*once.global_batches, *once.global_batches)
        assert twice.num_microbatches == (2, 2, 2, 2)
        assert with_epochs(shard, 1).schedule == once


def test_what_a_late_replica_owes_has_partition_samples_and_column() -> None:
    shard = batch_of([4] * 4).slice(1, 3)
    assert awaited_of("compute_logprobs", shard, POLICY_COLUMNS) == (
        "partition 'train-1': column 'prev_logprobs', column 'reference_logprobs' of its 2 samples a/1, b/0 "
        "is awaited"
    )
    assert awaited_of("train", shard, []) == "partition 'train-1': train of its 2 samples a/1, b/0 is awaited"
