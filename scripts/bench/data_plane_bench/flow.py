"""A GRPO step's traffic over a plane, between real processes.

    producer ── put ──▶ ─┬─ fetch ─▶ worker 0..DP-1 ── write prev_logprobs ─────▶
                         ├─ fetch ─▶ worker 0..DP-1 ── write reference_logprobs ▶
                         ├─ fetch ─▶ driver ────────── write advantages ────────▶   (usual flow only)
                         └─ fetch ─▶ worker 0..DP-1, training

In the usual flow every stage fetches all that it needs, and the driver reads and writes columns. As
this framework's driver works, one stage writes both columns of log-probs, in the background, workers keep
what they fetched or wrote, an advantage is a scalar per sample in the metadata, and the driver goes on while
a partition is closed.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import ray

from nemo_like.cluster.actors import ActorHandle
from scripts.bench.data_plane_bench.batch import (
    DRIVER_READS,
    LOGPROB_READS,
    REFERENCE_READS,
    TRAIN_READS,
    Shape,
)
from scripts.bench.data_plane_bench.planes import OUR_COLUMNS, Rows
from scripts.bench.data_plane_bench.station import Stage, StageResult, Station

_DEADLINE_S = 300.0


class Flow(Enum):
    usual = "usual"
    as_used = "as_used"


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Wall time in seconds."""

    first_put_s: float  # in the producer
    fetch_s: float  # the first fetch of what was put, in the slowest worker
    step_s: float  # as the driver sees it, calls to the actors included


@dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """The processes of a step."""

    driver: Station
    producer: ActorHandle
    workers: Sequence[ActorHandle]
    host: ActorHandle  # of this framework's data plane

    def load(self, shape: Shape) -> None:
        self.driver.load(shape)
        _gather([station.submit("load", shape) for station in (self.producer, *self.workers)])


_partitions = itertools.count()
_LOGPROBS = Stage(LOGPROB_READS, ("prev_logprobs",))
_REFERENCE = Stage(REFERENCE_READS, ("reference_logprobs",))
_BOTH = Stage(LOGPROB_READS, ("prev_logprobs", "reference_logprobs"), keeps=True)
_DRIVER = Stage(DRIVER_READS, ("advantages",))
_TRAIN = Stage((*TRAIN_READS, "advantages"))


def step(cast: Cast, plane: str, flow: Flow, num_workers: int, action: str = "stage") -> StepTimes:
    """One step; ``action`` is the stations' method for a stage: "stage", or "check" to compare values."""
    workers = cast.workers[:num_workers]
    partition = f"{plane}-{flow.value}-{next(_partitions)}"
    started = time.perf_counter()
    if plane == "ours":
        _gather([cast.host.submit("open_partition", partition, OUR_COLUMNS, num_workers)])
    ((whole, first_put_s),) = _gather([cast.producer.submit("put", plane, partition)])
    client = cast.driver.client(plane)
    if flow is Flow.as_used:
        whole = client.mix(whole)

    def run(stage: Stage, shards: Sequence[Rows]) -> list[StageResult]:
        calls = [
            worker.submit(action, plane, rows, stage) for worker, rows in zip(workers, shards, strict=True)
        ]
        return _gather(calls)

    def merged(results: Sequence[StageResult]) -> Rows:
        return client.merge(whole, [result.written for result in results])

    first = run(_LOGPROBS if flow is Flow.usual else _BOTH, client.shard(whole, num_workers))
    whole = merged(first)
    if flow is Flow.usual:
        whole = merged(run(_REFERENCE, client.shard(whole, num_workers)))
        whole = client.merge(whole, [getattr(cast.driver, action)(plane, whole, _DRIVER).written])
    whole = client.tag(whole, [0.5] * len(whole.rows))
    train = _TRAIN if flow is Flow.usual else Stage(TRAIN_READS)
    run(train, client.shard_for_training(whole, num_workers))
    client.clear(whole)
    closing = [cast.host.submit("close_partition", partition)] if plane == "ours" else []
    if flow is Flow.usual:
        _gather(closing)
    step_s = time.perf_counter() - started
    _gather(closing)
    return StepTimes(first_put_s, max(result.fetch_s for result in first), step_s)


def _gather(calls: Sequence[Any]) -> list[Any]:
    return ray.get([call.ref for call in calls], timeout=_DEADLINE_S)
