"""What the group does with metadata and answers, without processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.batch.columns import POLICY_COLUMNS, TEACHER_LOGPROBS, Declaration
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import GROUP_ID, NUM_PROMPT_TOKENS
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.stage import Stage
from nemo_like.configuration import Config, load_config
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.metrics import mean
from nemo_like.policy.groups.group import (
    PolicyWorkerGroup,
    TeacherWorkerGroup,
    ValueWorkerGroup,
    awaited_text,
    gathered_tags,
    with_epochs,
)
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.groups.results import WorkerScores, WorkerUpdate
from nemo_like.policy.loss.checked_loss import LossFailed
from nemo_like.policy.workers.training_worker import naming_samples
from tests.unit.config.checkpoints import PADDED


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
    group = PolicyWorkerGroup(workers, Answers(), cfg, num_epochs=1, deadline_s=lambda stage: 1.0)
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


def test_workers_can_say_which_sample_a_loss_failed_on(demo: Callable[..., Config]) -> None:
    cfg = demo(
        "policy.data_parallel_size=1",
        "policy.train_global_batch_size=8",
        "policy.sequence_packing.share_prompts=false",
    ).policy
    worker = Worker(parallel_layout(cfg).coordinates(0))
    group = PolicyWorkerGroup([worker], Answers(), cfg, num_epochs=1, deadline_s=lambda stage: 1.0)
    batch = batch_of([4] * 8).with_tags({GROUP_ID.name: [7] * 4 + [9] * 4})
    group.compute_logprobs(batch, POLICY_COLUMNS)
    (shard,) = worker.shards
    with pytest.raises(LossFailed, match=r"^step 1, sample 1 of prompt 9: wrong$"), naming_samples(shard):
        raise LossFailed("wrong", 5)


def test_a_step_without_training_ends_on_every_worker(demo: Callable[..., Config]) -> None:
    cfg = demo("policy.data_parallel_size=2").policy
    asked: list[tuple[str, str]] = []

    class Skipping(Worker):
        def submit(self, method: str, *args: Any) -> Any:
            asked.append((method, *args))
            return [Operation("write", {"prev_logprobs": 4}, 0.5)] if self.place.is_leader else ()

    workers = [Skipping(parallel_layout(cfg).coordinates(rank)) for rank in range(2)]
    group = PolicyWorkerGroup(workers, Answers(), cfg, num_epochs=1, deadline_s=lambda stage: 1.0)
    group.version = 3
    update = group.skip(batch_of([4] * 8))
    assert asked == [("skip", "train-1")] * 2
    assert (update.version, update.metrics, len(update.operations)) == (3, {}, 2)


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
    assert awaited_text("compute_logprobs", shard, POLICY_COLUMNS) == (
        "partition 'train-1': column 'prev_logprobs', column 'reference_logprobs' of its 2 samples a/1, b/0 "
        "is awaited"
    )
    assert (
        awaited_text("train", shard, []) == "partition 'train-1': train of its 2 samples a/1, b/0 is awaited"
    )


TWO_REPLICAS = (
    "policy.data_parallel_size=2",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.train_global_batch_size=4",
    "policy.sequence_packing.share_prompts=false",
)


class AccumulatingWorker(Worker):
    """Keeps what it was asked; at version 1 after each training."""

    def __init__(self, place: Coordinates) -> None:
        super().__init__(place)
        self.calls: list[tuple[str, Any]] = []

    def submit(self, method: str, *args: Any) -> Any:
        self.calls.append((method, pickle.loads(pickle.dumps(args[0])) if args else None))
        if method == "settle":
            return 1
        if not self.place.is_leader:
            return None
        return WorkerUpdate({}, 1, 0.0, ()) if method == "train" else 0.5 + self.place.dp


def accumulating_group(
    demo: Callable[..., Config], num_epochs: int = 1
) -> tuple[list[AccumulatingWorker], PolicyWorkerGroup]:
    """Two replicas of two workers; an update has four samples."""
    cfg = demo(*TWO_REPLICAS).policy
    layout = parallel_layout(cfg)
    workers = [AccumulatingWorker(layout.coordinates(rank)) for rank in range(4)]
    group = PolicyWorkerGroup(workers, Answers(), cfg, num_epochs=num_epochs, deadline_s=lambda stage: 1.0)
    return workers, group


def test_parts_reach_the_replicas_and_training_leaves_out_what_they_computed(
    demo: Callable[..., Config],
) -> None:
    batch = batch_of([4] * 8).with_tags({"advantage": [1.0] * 8, "is_idle": [False] * 4 + [True] * 4})
    workers, group = accumulating_group(demo)
    part = group.accumulate(batch.subset([3, 0]))
    assert (part.num_computed, part.compute_s) == (2, 1.5)
    group.accumulate(batch.subset([1, 2]))
    update = group.train(batch, num_accumulated=4)
    assert update.planned_counts == [[(4, 4), (4, 4)]] * 2
    assert update.metrics["num_skipped_samples"].value == 2  # of four idle ones, one per replica is computed
    for worker in workers:
        assert [method for method, _ in worker.calls] == ["accumulate", "accumulate", "train"]
        first, second, trained = (shard for _, shard in worker.calls)
        assert [len(first), len(second), len(trained)] == [1, 1, 1]
        accumulated, other = trained.schedule.global_batches
        assert (accumulated.micro_batches, accumulated.num_tokens) == ((), 4)
        assert (other.num_rows, other.num_tokens) == (1, 4)
    computed = {worker.place.dp: worker.calls[0][1].sample_ids for worker in workers}
    assert sorted(computed.values()) == [("a/0",), ("a/3",)]


@pytest.mark.parametrize(("num_epochs", "num_left"), [(1, 0), (2, 2)])
def test_one_update_leaves_nothing_to_fetch_but_for_another_epoch(
    demo: Callable[..., Config], num_epochs: int, num_left: int
) -> None:
    batch = batch_of([4] * 4).with_tags({"advantage": [1.0] * 4})
    workers, group = accumulating_group(demo, num_epochs)
    group.accumulate(batch)
    assert group.train(batch, num_accumulated=4).metrics["num_skipped_samples"].value == 0
    assert {len(worker.calls[-1][1]) for worker in workers} == {num_left}
    group.accumulate(batch)  # of the next step


def test_idle_samples_alone_are_computed_by_no_one_until_training(demo: Callable[..., Config]) -> None:
    batch = batch_of([4] * 4).with_tags({"advantage": [0.0] * 4, "is_idle": [True] * 4})
    workers, group = accumulating_group(demo)
    for start in (0, 2):
        assert group.accumulate(batch.slice(start, start + 2)).num_computed == 0
    assert group.train(batch, num_accumulated=4).metrics["num_skipped_samples"].value == 2
    for worker in workers:
        ((method, trained),) = worker.calls
        assert (method, trained.schedule.num_rows) == ("train", 1)


def test_samples_that_do_not_divide_or_that_training_is_not_told_of_are_refused(
    demo: Callable[..., Config],
) -> None:
    batch = batch_of([4] * 4).with_tags({"advantage": [1.0] * 4})
    workers, group = accumulating_group(demo)
    with pytest.raises(ValueError, match=r"3 samples do not divide over policy\.data_parallel_size=2; accum"):
        group.accumulate(batch.slice(0, 3))
    group.accumulate(batch)
    with pytest.raises(ValueError, match="train was told of 0"):
        group.train(batch)
    assert [method for method, _ in workers[0].calls] == ["accumulate"]


@pytest.mark.parametrize("drop", [lambda group: group.settle(), lambda group: group.load_checkpoint("p", 5)])
def test_an_abandoned_step_and_a_checkpoint_drop_what_was_accumulated(
    demo: Callable[..., Config], drop: Callable[[PolicyWorkerGroup], object]
) -> None:
    batch = batch_of([4] * 4).with_tags({"advantage": [1.0] * 4})
    workers, group = accumulating_group(demo)
    group.accumulate(batch)
    drop(group)
    group.train(batch)
    assert workers[0].calls[-1][1].schedule.num_rows == 2


def test_a_part_of_an_update_is_scored_where_it_will_train(demo: Callable[..., Config]) -> None:
    workers, group = accumulating_group(demo)
    part = batch_of([3, 9, 4, 8, 5, 7, 6, 2]).with_tags({"advantage": [1.0] * 8}).subset([6, 1])
    scoring = [Worker(worker.place) for worker in workers]
    scorer = PolicyWorkerGroup(
        scoring, Answers(), demo(*TWO_REPLICAS).policy, num_epochs=1, deadline_s=lambda stage: 1.0
    )
    scorer.compute_logprobs(part, POLICY_COLUMNS)
    group.accumulate(part)
    for worker, scored in zip(workers, scoring, strict=True):
        assert worker.calls[0][1].sample_ids == scored.shards[0].sample_ids


class ValueAnswers:
    """A cluster whose calls are their results; it keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, float, list[str]]] = []

    def gather(
        self, calls: Sequence[Any], *, stage: str, timeout_s: float, watching: Sequence[Any]
    ) -> list[Any]:
        self.asked.append((stage, timeout_s, [handle.name for handle in watching]))
        return list(calls)


class ValueWorkerStandIn:
    """The sum of the advantages of sample i is i, by the sample's id; a leader's metrics say its replica."""

    def __init__(self, place: Coordinates) -> None:
        self.place, self.name = place, f"value_worker-{place.rank}"
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def submit(self, method: str, *args: Any) -> WorkerScores | WorkerUpdate | None:
        received = pickle.loads(pickle.dumps(args))
        self.calls.append((method, received))
        if not self.place.is_leader:
            return None
        metrics = {"mean": mean(float(self.place.dp), 1.0)}
        if method == "train":
            return WorkerUpdate(metrics, 7, float(self.place.dp), ())
        (shard,) = received
        sums = [float(sample.rpartition("/")[2]) for sample in shard.sample_ids]
        return WorkerScores({"token_advantage_sum": sums}, metrics, float(self.place.dp))


PPO = Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml"


def test_a_critics_workers_get_their_replicas_samples_and_leaders_answers_come_back_in_order() -> None:
    cfg = load_config(
        PPO,
        [
            "value.data_parallel_size=2",
            "value.megatron_cfg.pipeline_model_parallel_size=2",
            "value.train_global_batch_size=4",
            "value.num_epochs_per_rollout=3",
        ],
    ).value
    assert cfg is not None
    layout, cluster = parallel_layout(cfg), ValueAnswers()
    workers = [ValueWorkerStandIn(layout.coordinates(rank)) for rank in range(4)]
    deadlines = {Stage.values: 3.0, Stage.value_training: 4.0}
    group = ValueWorkerGroup(
        workers, cluster, cfg, num_epochs=cfg.num_epochs_per_rollout, deadline_s=deadlines.__getitem__
    )
    count = 8
    batch = batch_of([4] * count).with_tags(
        {
            "shaped_reward": [0.5] * count,
            "is_truncated": [False] * count,
            "advantage": [1.0] * count,
            "group_id": [0] * 4 + [1] * 4,
            "num_prompt_tokens": [1] * count,
        }
    )
    valued = group.compute_values(batch)
    assert valued.batch.tags["token_advantage_sum"] == (0.0, 1.0, 2.0, 3.0, 0.0, 1.0, 2.0, 3.0)
    assert valued.batch.columns == {"values", "returns", "token_advantages"}
    assert valued.batch.tags["advantage"] == batch.tags["advantage"]
    assert (valued.compute_s, valued.metrics["mean"].value) == (1.0, 0.5)
    update = group.train(valued.batch)
    assert (update.version, group.version, update.compute_s) == (7, 7, 1.0)
    assert update.planned_counts == [[(4, 4), (4, 4)]] * 2
    names = [worker.name for worker in workers]
    assert cluster.asked == [("value.compute_values", 3.0, names), ("value.train", 4.0, names)]
    for worker in workers:
        (valuing,), (training,) = (args for _, args in worker.calls)
        assert valuing.sample_ids == training.sample_ids
        assert valuing.schedule.with_ends
        assert len(valuing.schedule.global_batches) == 1
        assert len(training.schedule.global_batches) == 3 * 2
        assert {"shaped_reward", "is_truncated", "sample_mask"} <= valuing.tags.keys()
        assert "advantage" not in training.tags
    samples = {worker.place.dp: worker.calls[0][1][0].sample_ids for worker in workers}
    assert sorted([*samples[0], *samples[1]]) == sorted(batch.sample_ids)


class TeacherAnswers(Worker):
    """A worker of a teacher that writes one column, and keeps the models by which it was asked to score."""

    def __init__(self, place: Coordinates) -> None:
        super().__init__(place)
        self.models: list[str] = []

    def submit(self, method: str, *args: Any) -> Any:
        if method == "declarations":
            return [Declaration("teacher", writes=(TEACHER_LOGPROBS,))]
        if method == "settle":
            return 0
        super().submit(method, *args)
        self.models.append(args[1])
        if not self.place.is_leader:
            return None
        return WorkerScores({}, {}, float(self.place.dp), (Operation("fetch", {"input_ids": 2}, 1.0),))


TEACHER = ("teacher=default", "teacher.model_name=general")


def teacher_group(cfg: Config) -> tuple[list[TeacherAnswers], TeacherWorkerGroup]:
    assert cfg.teacher is not None
    layout = parallel_layout(cfg.teacher)
    workers = [TeacherAnswers(layout.coordinates(rank)) for rank in range(layout.world_size)]
    deadlines = {Stage.teacher_logprobs: 1.0}.get
    group = TeacherWorkerGroup(workers, Answers(), cfg.teacher, deadline_s=deadlines)
    return workers, group


def test_a_teacher_adds_its_columns_and_stays_at_version_0(demo: Callable[..., Config]) -> None:
    workers, group = teacher_group(demo("policy.megatron_cfg.tensor_model_parallel_size=2", *TEACHER))
    batch = batch_of([4] * 8)
    batch = batch.with_tag(GROUP_ID, [0] * 4 + [1] * 4).with_tag(NUM_PROMPT_TOKENS, [2] * 8)
    taught = group.compute_teacher_logprobs(batch)
    assert taught.batch.columns == {"teacher_logprobs"}
    assert taught.batch.tags == batch.tags
    assert taught.compute_s == 1.0
    assert len(taught.operations) == 2
    assert [len(worker.shards[0]) for worker in workers] == [4, 4, 4, 4]
    assert group.settle() == group.version == 0


def test_each_model_of_a_teacher_is_called_once_with_the_samples_of_its_tasks_filled_up(
    demo: Callable[..., Config],
) -> None:
    """Five groups of three: those of maths and physics have one model, that of code has another, and that of
    logic has the teacher's own. Two replicas share each part evenly."""
    workers, group = teacher_group(
        demo(*TEACHER, "teacher.models={maths: science, physics: science, code: coder, law: lawyer}", *PADDED)
    )
    tasks = ("maths", "code", "physics", "maths", "logic")
    lengths = {"maths": 6, "code": 5, "physics": 7, "logic": 4}
    chunks = tuple(Chunk(f"{number}", (lengths[task],) * 3) for number, task in enumerate(tasks))
    batch = KVBatchMeta(
        partition="train-1",
        chunks=chunks,
        rows=tuple((number, row) for number in range(5) for row in range(3)),
        columns=frozenset(),
        tags={
            "sample_mask": (1.0,) * 15,
            "num_response_tokens": (1,) * 15,
            "task": tuple(task for task in tasks for _ in range(3)),
        },
    )
    taught = group.compute_teacher_logprobs(batch)
    assert [worker.models for worker in workers] == [["science", "coder", "general"]] * 2
    scored = [
        sorted(sample for worker in workers for sample in worker.shards[call].sample_ids) for call in range(3)
    ]
    assert scored == [
        # Nine samples are filled up by the shortest group of others, that of logic.
        sorted(f"{group}/{row}" for group in (0, 2, 3, 4) for row in range(3)),
        sorted(f"{group}/{row}" for group in (1, 4) for row in range(3)),
        sorted(f"{group}/{row}" for group in (4, 1) for row in range(3)),
    ]
    assert [[len(shard) for shard in worker.shards] for worker in workers] == [[6, 3, 3]] * 2
    assert taught.batch.columns == {"teacher_logprobs"}
    assert taught.batch.tags == batch.tags
    # The models score one after the other, and each as long as its slowest replica.
    assert taught.compute_s == 3.0
    assert len(taught.operations) == 6
