"""The driver's side of the worker groups: it dispatches work by metadata and takes answers from the leaders.

    meta ──shard──▶ one meta per data-parallel rank ──▶ every rank of that replica
                                                          leaders answer
    meta + tags in its own order ◀──merge── tags, metrics, seconds

``PolicyWorkerGroup`` drives the policy's workers, ``ValueWorkerGroup`` a critic's, ``TeacherWorkerGroup`` a
teacher's. This module runs in the driver's process, so it imports no tensor library.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, partial
from itertools import chain
from typing import Any, ClassVar

from nemo_like.batch.columns import VALUE_COLUMNS, Column, Declaration
from nemo_like.batch.meta import GlobalBatch, KVBatchMeta
from nemo_like.batch.sharding import (
    add_whole_groups,
    shard_for_logprobs,
    shard_for_training,
    shard_for_values,
    without_first_update,
)
from nemo_like.batch.tags import (
    GROUP_ID,
    IS_IDLE,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    SAMPLE_MASK,
    TASK,
    Tag,
)
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.cluster.actor_errors import StageTimeout
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.pickled import Pickled
from nemo_like.cluster.stage import Stage
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.data_plane.storage_errors import listed
from nemo_like.observability.metrics import Metric, merge, summed
from nemo_like.policy.backends.interface import POLICY_TAGS, TRIPWIRE_TAGS, VALUE_TAGS
from nemo_like.policy.groups.accumulated_samples import AccumulatedSamples
from nemo_like.policy.groups.layout import models_of_samples
from nemo_like.policy.groups.parallelism import (
    FIRST_REPLICA,
    gathers_weights,
    logprob_strategy,
    parallel_layout,
    train_strategy,
)
from nemo_like.policy.groups.results import Accumulation, ScoredBatch, TrainUpdate, WorkerScores, WorkerUpdate
from nemo_like.policy.options import TeacherConfig, TrainedGroupConfig, WorkerGroupConfig

_STAGES = {
    "compute_logprobs": Stage.logprobs,
    "compute_teacher_logprobs": Stage.teacher_logprobs,
    "compute_values": Stage.values,
    "canary_logprobs": Stage.logprobs,
    "declarations": Stage.logprobs,
    "connect_weights": Stage.weight_sync,
    "push_weights": Stage.weight_sync,
    "export_hf": Stage.checkpoint,
    "save_checkpoint": Stage.checkpoint,
    "has_written_checkpoint": Stage.checkpoint,
    "wait_for_checkpoint": Stage.checkpoint,
    "corrupt_checkpoint_files": Stage.checkpoint,
    "load_checkpoint": Stage.checkpoint,
}
# Any other call, such as ``train``, has the deadline of the group's ``other_calls``. So has ``settle``, which
# is called when a step is abandoned: the workers first finish their earlier calls.


class WorkerGroup(ABC):
    """The driver's view of all workers that together hold one model.

    The worker ``handles[rank]`` has the coordinates of this rank in the layout of ``cfg``; ``deadline_s``
    returns a stage's deadline. Each method waits for its calls and raises what ``Cluster.gather`` raises.
    """

    name: ClassVar[str]  # in messages
    other_calls: ClassVar[Stage]  # the stage whose deadline holds for calls that _STAGES does not name
    read_tags: ClassVar[Sequence[Tag[Any]]]  # the tags of a batch that a worker reads

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        cluster: Cluster,
        cfg: WorkerGroupConfig,
        *,
        deadline_s: Callable[[Stage], float],
    ) -> None:
        layout = parallel_layout(cfg)
        if len(handles) != layout.world_size:
            raise ValueError(f"{len(handles)} {self.name} workers for a layout of {layout.world_size}")
        self._cluster, self._cfg, self._deadline_s = cluster, cfg, deadline_s
        self.version = 0  # as the last training phase or checkpoint left the weights
        self._workers = [(handle, layout.coordinates(rank)) for rank, handle in enumerate(handles)]
        self._num_replicas = layout.dp

    def declarations(self) -> Sequence[Declaration]:
        """Ask the first worker which columns the group's phases write and read."""
        return self._ask("declarations", _first_worker)[0]

    def settle(self) -> int | None:
        """Have the workers abandon the step, and wait until they have ended their earlier calls.

        Returns the version if all workers hold the same complete version, else None.
        """
        versions = set(self._ask("settle", _every_worker))
        return versions.pop() if len(versions) == 1 else None

    def reconnect_data_plane(self, spec: DataPlaneSpec) -> None:
        """Have the workers close their connections and connect to the data plane of ``spec`` instead."""
        self._ask("reconnect_data_plane", _every_worker, spec)

    def _with_needed_tags(self, batch: KVBatchMeta) -> KVBatchMeta:
        """Return the batch with only the tags that scheduling or a worker reads."""
        needed: list[Tag[Any]] = [
            NUM_RESPONSE_TOKENS,
            *(tag for tag in self.read_tags if batch.has_tag(tag)),
        ]
        if self._cfg.sequence_packing.share_prompts:
            needed += [GROUP_ID, NUM_PROMPT_TOKENS]
        return batch.only_tags(*needed)

    def _on_replicas(
        self, method: str, shards: Sequence[KVBatchMeta], *args: Any, columns: Sequence[Column] = ()
    ) -> list[Any]:
        """Call ``method`` on every worker with its replica's shard and ``args``; return the leaders' answers
        by data-parallel rank.

        A shard is pickled once for all workers of its replica. A StageTimeout that this raises says which
        ``columns`` and samples the late replicas still owe.
        """
        pickled = [Pickled(shard) for shard in shards]
        calls = [
            handle.submit(method, pickled[coordinates.dp], *args) for handle, coordinates in self._workers
        ]
        try:
            answers = self._wait(method, calls)
        except StageTimeout as error:
            late = {
                coordinates.dp for handle, coordinates in self._workers if handle.name in error.waiting_for
            }
            error.awaited = "\n".join(awaited_text(method, shards[dp], columns) for dp in sorted(late))
            raise
        leaders = [
            (coordinates.dp, answer)
            for (_, coordinates), answer in zip(self._workers, answers, strict=True)
            if coordinates.is_leader
        ]
        return [answer for _, answer in sorted(leaders, key=lambda leader: leader[0])]

    def _ask(self, method: str, where: Callable[[Coordinates], bool], *args: Any) -> list[Any]:
        return self._wait(method, self._calls(method, where, *args))

    def _calls(self, method: str, where: Callable[[Coordinates], bool], *args: Any) -> list[Call]:
        return [handle.submit(method, *args) for handle, coordinates in self._workers if where(coordinates)]

    def _wait(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """Wait for calls that need no other actors; only a worker's own death raises ActorDied.

        The calls also use the data plane; when it fails, they report that themselves.
        """
        return self._cluster.gather(
            calls,
            stage=f"{self.name}.{method}",
            timeout_s=self._deadline_s(_STAGES.get(method, self.other_calls)),
            watching=[handle for handle, _ in self._workers],
        )


class TrainingGroup(WorkerGroup):
    """The driver's view of workers that train their model; ``train`` passes ``num_epochs`` times over its
    batch."""

    _cfg: TrainedGroupConfig

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        cluster: Cluster,
        cfg: TrainedGroupConfig,
        *,
        num_epochs: int,
        deadline_s: Callable[[Stage], float],
    ) -> None:
        super().__init__(handles, cluster, cfg, deadline_s=deadline_s)
        self._num_epochs = num_epochs
        self._accumulated = AccumulatedSamples(cfg.train_global_batch_size)

    def train(self, batch: KVBatchMeta, *, num_accumulated: int = 0) -> TrainUpdate:
        """Make the optimizer updates over the batch, in every epoch; needs the tag sample_mask, and for the
        policy advantage.

        Samples with a true tag is_idle count in the loss's normalisation but are not computed, except for a
        few that give every replica equally many samples. ``num_accumulated`` samples were accumulated before:
        none, or all samples of the batch's first update, in any order and with the same tags. Raises
        ValueError when something else was accumulated, and RuntimeError when the replicas answer with
        different policy versions.
        """
        needed = self._with_needed_tags(batch)
        self._accumulated.check(needed, num_accumulated)
        shards = self._shards_for_training(batch, self._cfg.train_global_batch_size)
        repeated = [with_epochs(shard, self._num_epochs) for shard in shards]
        if self._accumulated.num_computed:  # else all samples were idle, and no worker holds a gradient
            repeated = [without_first_update(shard) for shard in repeated]
        answers: list[WorkerUpdate] = self._on_replicas("train", repeated)
        num_computed = self._accumulated.num_computed + sum(
            update.num_rows for shard in repeated for update in _of_one_epoch(shard, self._num_epochs)
        )
        self._accumulated.clear()
        versions = {answer.version for answer in answers}
        if len(versions) != 1:
            raise RuntimeError(f"{self.name} replicas are at different versions: {sorted(versions)}")
        self.version = versions.pop()
        return TrainUpdate(
            metrics={
                **merge(answer.metrics for answer in answers),
                "num_skipped_samples": summed(len(batch) - num_computed),
            },
            version=self.version,
            compute_s=max(answer.compute_s for answer in answers),
            operations=[operation for answer in answers for operation in answer.operations],
            measured=merge(answer.measured for answer in answers),
            named=answers[0].named,
            planned_counts=[_counts(shard) for shard in shards],
        )

    def _shards_for_training(self, batch: KVBatchMeta, update_size: int) -> tuple[KVBatchMeta, ...]:
        return shard_for_training(
            self._with_needed_tags(batch),
            num_shards=self._num_replicas,
            global_batch_size=update_size,
            strategy=train_strategy(self._cfg),
            is_idle=batch.tag(IS_IDLE) if batch.has_tag(IS_IDLE) else None,
        )

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Have the workers write the state from which training can continue into the empty directory
        ``path``.

        With background writing, return once every worker has copied its state to host memory.
        """
        self._ask("save_checkpoint", _every_worker, path, writing)

    def has_written_checkpoint(self) -> bool:
        """Return whether the latest checkpoint is on disk; raise ActorFailed when it could not be written."""
        return all(self._ask("has_written_checkpoint", _every_worker))

    def wait_for_checkpoint(self) -> dict[str, str]:
        """Wait until the latest checkpoint is on disk; return the SHA-256 of its files by name. Raises
        ActorFailed when it could not be written."""
        shares = self._ask("wait_for_checkpoint", _every_worker)
        return {name: digest for share in shares for name, digest in share.items()}

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
        """Have each worker hash its share of a checkpoint's files; return the names of files that differ from
        ``digests``."""
        shares = self._ask("corrupt_checkpoint_files", _every_worker, path, digests)
        return [name for share in shares for name in share]

    def load_checkpoint(self, path: str, version: int, parts: ResumeParts = ResumeParts.all) -> None:
        """Have the workers take these parts of a checkpoint, which another parallel layout may have written,
        and forget what they accumulated."""
        self._accumulated.clear()
        self._ask("load_checkpoint", _every_worker, path, version, parts)
        self.version = version

    def skip(self, batch: KVBatchMeta) -> TrainUpdate:
        """Have the workers end a step without training on ``batch``; return when the columns that they
        computed are written."""
        operations: list[Sequence[Operation]] = self._ask("skip", _every_worker, batch.partition)
        return TrainUpdate(
            metrics={}, version=self.version, compute_s=0.0, operations=list(chain(*operations))
        )

    def settle(self) -> int | None:
        """Abandon the step as ``WorkerGroup.settle`` does; the workers also forget what they accumulated."""
        self._accumulated.clear()
        return super().settle()


class PolicyWorkerGroup(TrainingGroup):
    """The driver's view of all policy workers; the replicas ``weight_replicas`` send the weights to
    engines."""

    name = "policy"
    other_calls = Stage.policy_training
    read_tags = (*POLICY_TAGS, *TRIPWIRE_TAGS, GROUP_ID)  # the last for messages

    def __init__(
        self,
        handles: Sequence[ActorHandle],
        cluster: Cluster,
        cfg: TrainedGroupConfig,
        *,
        num_epochs: int,
        deadline_s: Callable[[Stage], float],
        weight_replicas: Sequence[int] = FIRST_REPLICA,
    ) -> None:
        super().__init__(handles, cluster, cfg, num_epochs=num_epochs, deadline_s=deadline_s)
        self._weight_replicas = tuple(weight_replicas)

    def connect_weights(self, receivers: Sequence[Any]) -> None:
        """Connect the workers that send weights with the generation engines' weight receivers."""
        self._with_engines("connect_weights", self._calls("connect_weights", _every_worker, receivers))

    def compute_logprobs(self, batch: KVBatchMeta, columns: Sequence[Column]) -> ScoredBatch:
        """Have the workers compute ``columns`` and start to write them: prev_logprobs, reference_logprobs or
        both, and entropies, which only come with prev_logprobs.

        The batch comes back with these columns and their tags: mult_prob_error with prev_logprobs, and with
        reference_logprobs the sums of the KL where the reward has a KL term. A batch that is not a whole
        number of updates is a part of one update: each sample goes to the worker to which ``accumulate``
        brings it.
        """
        update_size = self._cfg.train_global_batch_size
        shards = shard_for_logprobs(
            self._with_needed_tags(batch),
            num_shards=self._num_replicas,
            global_batch_size=len(batch) if len(batch) % update_size else update_size,
            strategy=logprob_strategy(self._cfg),
        )
        answers: list[WorkerScores] = self._on_replicas("compute_logprobs", shards, columns, columns=columns)
        return scored_batch(batch.with_columns(*columns), shards, answers)

    def accumulate(self, batch: KVBatchMeta) -> Accumulation:
        """Have the workers add the gradient of these samples' loss, not yet normalised, to the gradients that
        they hold for the step's first update; needs the tags that ``train`` needs.

        It may be called again with further samples of that update, in any order and number that divides over
        the replicas, and with scoring in between. ``train`` then gets all samples of the step. Raises
        ValueError when the samples do not divide, are more than an update has, or were accumulated before.
        """
        if len(batch) % self._num_replicas or not len(batch):
            raise ValueError(
                f"{len(batch)} samples do not divide over policy.data_parallel_size={self._num_replicas}; "
                "accumulate a multiple of it, and hold the others back for the next call"
            )
        needed = self._with_needed_tags(batch)
        self._accumulated.check_new(needed)
        if batch.has_tag(IS_IDLE) and all(batch.tag(IS_IDLE)):
            self._accumulated.add(needed, 0)
            return Accumulation(num_computed=0, compute_s=0.0)
        shards = self._shards_for_training(batch, len(batch))
        seconds: list[float] = self._on_replicas("accumulate", shards)
        num_computed = sum(shard.schedule.num_rows for shard in shards if shard.schedule)
        self._accumulated.add(needed, num_computed)
        return Accumulation(num_computed, max(seconds))

    def canary_logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Have all workers score a few tokens at temperature 1; return the log-probs of all tokens but the
        first, nats."""
        return self._ask("canary_logprobs", _every_worker, tuple(token_ids))[0]

    def ask_all(self, method: str, *args: Any) -> list[Any]:
        """Return every worker's answer to a call that is no stage of a step, by rank."""
        return self._ask(method, _every_worker, *args)

    def push_weights(self, version: int) -> dict[str, Metric]:
        """Send the weights to the engines as policy version ``version``; return once all engines have it."""
        gathers = partial(gathers_weights, self._cfg, replicas=self._weight_replicas)
        calls = self._calls("push_weights", gathers, version)
        return merge(self._with_engines("push_weights", calls))

    def export_hf(self, path: str) -> None:
        """Have the workers write a Hugging Face checkpoint directory."""
        self._ask("export_hf", partial(gathers_weights, self._cfg), path)

    def _with_engines(self, method: str, calls: Sequence[Call]) -> list[Any]:
        """Wait for calls that also need the engines: the death of any actor of the run raises ActorDied."""
        timeout_s = self._deadline_s(_STAGES[method])
        return self._cluster.gather(calls, stage=f"policy.{method}", timeout_s=timeout_s)


class ValueWorkerGroup(TrainingGroup):
    """The driver's view of a critic's workers."""

    name = "value"
    other_calls = Stage.value_training
    read_tags = (*VALUE_TAGS, *TRIPWIRE_TAGS)

    def compute_values(self, batch: KVBatchMeta) -> ScoredBatch:
        """Have the workers value the batch, estimate the advantages and returns of its tokens, and start to
        write these columns; needs the tags shaped_reward, is_truncated and sample_mask.

        The batch comes back with the columns, and with the sums of the advantages as tags.
        """
        shards = shard_for_values(
            self._with_needed_tags(batch),
            num_shards=self._num_replicas,
            global_batch_size=self._cfg.train_global_batch_size,
            strategy=logprob_strategy(self._cfg),
            train_strategy=train_strategy(self._cfg),
        )
        answers: list[WorkerScores] = self._on_replicas("compute_values", shards)
        return scored_batch(batch.with_columns(*VALUE_COLUMNS), shards, answers)


class TeacherWorkerGroup(WorkerGroup):
    """The driver's view of a teacher's workers, or of the engine in their place. A teacher never trains, so
    its version stays 0.

        batch ──▶ by task: each model's samples, filled up ──shard──▶ one call per model, one after the other
    """

    name = "teacher"
    other_calls = Stage.teacher_logprobs
    read_tags = (SAMPLE_MASK, TASK)
    _cfg: TeacherConfig

    def compute_teacher_logprobs(self, batch: KVBatchMeta) -> ScoredBatch:
        """Have the workers score each sample by the model of its task, and write the teacher's columns that
        the loss reads.

        The batch comes back with these columns. With ``teacher.models`` it needs the tag task.
        """
        needed = self._with_needed_tags(batch)
        models = models_of_samples(self._cfg, needed)
        answers = [
            self._scored_by(model, needed, [one == model for one in models])
            for model in dict.fromkeys(models)
        ]
        return ScoredBatch(
            batch=batch.with_columns(*self._written),
            compute_s=sum(max(one.compute_s for one in of_model) for of_model in answers),
            operations=[operation for one in chain(*answers) for operation in one.operations],
        )

    def _scored_by(self, model: str, batch: KVBatchMeta, is_own: Sequence[bool]) -> list[WorkerScores]:
        """Have the workers score by ``model`` the samples whose ``is_own`` is true; return the leaders'
        answers."""
        strategy, num_shards = logprob_strategy(self._cfg), self._num_replicas
        if not all(is_own):
            batch = add_whole_groups(batch, is_own, num_shards=num_shards, strategy=strategy)
        # A teacher makes no updates, so its samples are sharded as one.
        shards = shard_for_logprobs(
            batch, num_shards=num_shards, global_batch_size=len(batch), strategy=strategy
        )
        return self._on_replicas("compute_teacher_logprobs", shards, model)

    @cached_property
    def _written(self) -> list[Column]:
        return [column for declaration in self.declarations() for column in declaration.writes]


def scored_batch(
    batch: KVBatchMeta, shards: Sequence[KVBatchMeta], answers: Sequence[WorkerScores]
) -> ScoredBatch:
    """Return ``batch`` with the tags of the leaders' answers; ``answers`` are in the order of ``shards``."""
    return ScoredBatch(
        batch=batch.with_tags(gathered_tags(batch, shards, answers)),
        metrics=merge(answer.metrics for answer in answers),
        compute_s=max(answer.compute_s for answer in answers),
        operations=[operation for answer in answers for operation in answer.operations],
    )


def awaited_text(method: str, shard: KVBatchMeta, columns: Sequence[Column]) -> str:
    """Return a sentence that names the columns and samples which a replica still owes."""
    what = ", ".join(f"column {column.name!r}" for column in columns) or method
    samples = f"{len(shard)} samples {listed(shard.sample_ids)}"
    return f"partition {shard.partition!r}: {what} of its {samples} is awaited"


def with_epochs(shard: KVBatchMeta, num_epochs: int) -> KVBatchMeta:
    """Return the shard with its schedule's updates repeated once per epoch."""
    return shard.with_schedule(shard.schedule and shard.schedule.repeated(num_epochs))


def _of_one_epoch(shard: KVBatchMeta, num_epochs: int) -> Sequence[GlobalBatch]:
    updates = shard.schedule.global_batches if shard.schedule else ()
    return updates[: len(updates) // num_epochs]


def _counts(shard: KVBatchMeta) -> list[tuple[int, int]]:
    """Return (response tokens, samples) by which each update of a shard's schedule is normalised."""
    updates = shard.schedule.global_batches if shard.schedule else ()
    return [(update.num_tokens, update.num_samples) for update in updates]


def _every_worker(coordinates: Coordinates) -> bool:
    return True


def _first_worker(coordinates: Coordinates) -> bool:
    return coordinates.rank == 0


def gathered_tags(
    batch: KVBatchMeta, shards: Sequence[KVBatchMeta], answers: Iterable[WorkerScores]
) -> dict[str, list[float]]:
    """Return the tags of the leaders' answers in the order of the whole batch; ``answers`` are in the order
    of ``shards``."""
    position = {row: number for number, row in enumerate(batch.rows)}
    chunk_number = {chunk.key: number for number, chunk in enumerate(batch.chunks)}
    tags: dict[str, list[float]] = {}
    for shard, answer in zip(shards, answers, strict=True):
        numbers = [chunk_number[chunk.key] for chunk in shard.chunks]
        indexes = [position[numbers[chunk], row] for chunk, row in shard.rows]
        for name, values in answer.tags.items():
            whole = tags.setdefault(name, [0.0] * len(batch))
            for index, value in zip(indexes, values, strict=True):
                whole[index] = value
    return tags
