#!/usr/bin/env python
"""The driver's own work in a step, from 8 to 512 policy workers and from 1,024 to 131,072 samples.

    python scripts/bench/driver_scale.py [--rounds 3] [--workers 8,16,...] [--samples 1024,2048,...]
                                         [--updates 2] [--micro-batches packed]

The real driver, policy worker group, sharding and metadata make whole steps, log-prob phase included, over
handles that pickle what they get and compute nothing: no actors, no Ray, no model. Prints JSON, of every
size the median over the rounds of the seconds spent in

    sharding   which rank gets which samples, and its micro-batches, in both phases
    dispatch   from there until every worker of both phases has its call, pickling included
    gathering  the leaders' answers unpickled, tags brought into the batch's order, metrics merged
    tripwires  debug.tripwires=cheap: what the driver compares itself
    elsewhere  the rest of the step: rewards, advantages, metrics

and the bytes that a worker gets. Where the workers grow, the samples are as many as there are at most, and
the other way round. Seconds are CPU time of the driver's thread, on which a busy machine has little
influence. Growth is that of the first three together from one size to the next.
"""

from __future__ import annotations

import argparse
import json
import pickle
import random
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.batch import tags
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.configuration import Config, load_config
from nemo_like.driver.checkpoints import RunPosition
from nemo_like.driver.rollout_schedule import RolloutSchedule
from nemo_like.driver.step_checks import RunFacts, StepTripwires
from nemo_like.driver.sync_grpo import Components, SyncGRPODriver
from nemo_like.observability.metrics import mean
from nemo_like.policy.groups import group
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.groups.results import WorkerScores, WorkerUpdate
from nemo_like.rollout.prompts import RolloutResult
from scripts.bench.arguments import at_least

REPOSITORY = Path(__file__).resolve().parents[2]
GROUP_SIZE = 8
WORKERS = (8, 16, 32, 64, 128, 256, 512)
SAMPLES = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
TENSOR_PARALLEL = 8  # of the layouts that do not spend all workers on data parallelism
PROMPT_TOKENS, MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 64, 400, 0.8, 4096
BUDGET = 4 * MAX_TOKENS  # tokens of a micro-batch
# Of the micro-batches, each with what it sets under policy.
KINDS = {
    "padded": ["micro_batch_order=by_length"],
    "dynamic": ["dynamic_batching.enabled=true"],
    "packed": ["sequence_packing.enabled=true"],
    "shared": ["sequence_packing.enabled=true", "sequence_packing.share_prompts=true"],
}
PHASES = ("sharding", "dispatch", "gathering")
# As many as a worker's answer has.
METRICS = {name: mean(1.0, 3.0) for name in ("lr", "grad_norm", *(f"metric_{n}" for n in range(18)))}


@dataclass(frozen=True, slots=True)
class Size:
    """One measurement."""

    data_parallel: int
    tensor_parallel: int
    samples: int

    @property
    def workers(self) -> int:
        return self.data_parallel * self.tensor_parallel


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=at_least(1), default=3, help="steps of each size, after one not counted"
    )
    parser.add_argument("--workers", type=numbers, default=WORKERS, help="each twice the one before")
    parser.add_argument("--samples", type=numbers, default=SAMPLES, help="each twice the one before")
    parser.add_argument("--updates", type=int, default=2, help="optimizer updates of a step")
    parser.add_argument("--micro-batches", choices=KINDS, default="packed")
    options = parser.parse_args()
    report = {}
    for name, sizes in series(options.workers, options.samples).items():
        figures = [measure(size, options) for size in sizes]
        report[name] = {"sizes": figures, "growth": growth(figures)}
    print(json.dumps(report, indent=2))
    return 0


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of an argument."""
    return tuple(int(number) for number in text.split(","))


def series(workers: Sequence[int], samples: Sequence[int]) -> dict[str, list[Size]]:
    """Either of them grows, in layouts with and without tensor parallelism."""
    return {
        f"more {what}, TP {tp}": [
            Size(num_workers // tp, tp, num_samples) for num_workers, num_samples in sizes
        ]
        for tp in (TENSOR_PARALLEL, 1)
        for what, sizes in (
            ("workers", [(count, samples[-1]) for count in workers]),
            ("samples", [(workers[-1], count) for count in samples]),
        )
    }


def growth(figures: Sequence[Mapping[str, Any]]) -> list[float]:
    """Each size's time over that of the one before."""
    totals = [sum(figure["seconds"][phase] for phase in PHASES) for figure in figures]
    return [round(after / before, 2) for before, after in pairwise(totals)]


def measure(size: Size, options: argparse.Namespace) -> dict[str, Any]:
    """Steps of one size; the first is warm-up."""
    cfg = configuration(size, options)
    clock = Clock()
    cluster = CountingCluster(clock, answers(size))
    driver = SyncGRPODriver(cfg, components(cfg, cluster, random_batch(size.samples)))
    rounds = []
    with timed_sharding(clock):
        for _ in range(options.rounds + 1):
            clock.seconds.clear()
            cluster.num_bytes = 0
            clock.enter("elsewhere")
            driver.step(1)
            clock.enter("elsewhere")
            rounds.append(dict(clock.seconds))
    phases = (*PHASES, "tripwires", "elsewhere")
    return {
        "workers": size.workers,
        "samples": size.samples,
        "seconds": {phase: round(statistics.median(one[phase] for one in rounds[1:]), 4) for phase in phases},
        "bytes_per_worker": cluster.num_bytes // size.workers,
    }


def configuration(size: Size, options: argparse.Namespace) -> Config:
    """The demo's, for these sizes and micro-batches."""
    budgets = {
        f"{kind}.{phase}_mb_tokens": BUDGET
        for kind in ("dynamic_batching", "sequence_packing")
        for phase in ("train", "logprob")
    }
    policy = {
        "data_parallel_size": size.data_parallel,
        "megatron_cfg.tensor_model_parallel_size": size.tensor_parallel,
        "train_global_batch_size": size.samples // options.updates,
        "max_total_sequence_length": MAX_TOKENS,
        "sequence_packing.enabled": "false",
        "sequence_packing.share_prompts": "false",
        **budgets,
    }
    settings = [f"{key}={value}" for key, value in policy.items()] + KINDS[options.micro_batches]
    return load_config(
        REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml",
        [
            f"grpo.num_prompts_per_step={size.samples // GROUP_SIZE}",
            f"grpo.num_generations_per_prompt={GROUP_SIZE}",
            "loss_fn.use_generation_logprobs_as_prev=false",
            *(f"policy.{setting}" for setting in settings),
        ],
    )


def random_batch(num_samples: int) -> KVBatchMeta:
    """What a rollout hands to the driver: a chunk per group, log-normal response lengths, half of the groups
    with different rewards."""
    rng = random.Random(0)
    num_groups = num_samples // GROUP_SIZE
    longest = MAX_TOKENS - PROMPT_TOKENS
    responses = [
        min(longest, max(1, round(MEDIAN_TOKENS * rng.lognormvariate(0.0, SIGMA))))
        for _ in range(num_samples)
    ]
    lengths = [PROMPT_TOKENS + response for response in responses]
    rewards = [rng.choice([0.0, 1.0]) if row // GROUP_SIZE % 2 else 1.0 for row in range(num_samples)]
    chunks = [
        Chunk(f"train-1/{number}", tuple(lengths[number * GROUP_SIZE : (number + 1) * GROUP_SIZE]))
        for number in range(num_groups)
    ]
    values: dict[tags.Tag[Any], Any] = {
        tags.GROUP_ID: [row // GROUP_SIZE for row in range(num_samples)],
        tags.REWARD: rewards,
        tags.IS_JUDGED: [True] * num_samples,
        tags.NUM_PROMPT_TOKENS: [PROMPT_TOKENS] * num_samples,
        tags.NUM_RESPONSE_TOKENS: responses,
        tags.NUM_TURNS: [1] * num_samples,
        tags.IS_TRUNCATED: [response == longest for response in responses],
        tags.POLICY_VERSION: [0] * num_samples,
    }
    return KVBatchMeta(
        partition="train-1",
        chunks=tuple(chunks),
        rows=tuple((row // GROUP_SIZE, row % GROUP_SIZE) for row in range(num_samples)),
        columns=frozenset(["input_ids", "response_mask", "generation_logprobs"]),
        tags={name: tuple(of_tag) for name, of_tag in tags.by_tag_name(values).items()},
    )


def answers(size: Size) -> dict[str, bytes]:
    """What a leader answers, by method; the shards are of equal size."""
    errors = {tags.MULT_PROB_ERROR.name: [1.0] * (size.samples // size.data_parallel)}
    return {
        "compute_logprobs": pickle.dumps(WorkerScores(errors, METRICS, 0.0)),
        "train": pickle.dumps(WorkerUpdate(METRICS, 1, 0.0, ())),
    }


class Clock:
    """CPU seconds of this thread by phase: each lasts until the next is entered."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.phase = "elsewhere"
        self._since = time.thread_time()

    def enter(self, phase: str) -> None:
        """From now on time counts for this phase."""
        now = time.thread_time()
        self.seconds[self.phase] += now - self._since
        self.phase, self._since = phase, now


@contextmanager
def timed_sharding(clock: Clock) -> Iterator[None]:
    """Let the worker group's sharding count as such."""

    def timed(shard: Callable[..., Any]) -> Callable[..., Any]:
        def sharded(*args: Any, **kwargs: Any) -> Any:
            clock.enter("sharding")
            shards = shard(*args, **kwargs)
            clock.enter("dispatch")
            return shards

        return sharded

    with (
        mock.patch.object(group, "shard_for_logprobs", timed(group.shard_for_logprobs)),
        mock.patch.object(group, "shard_for_training", timed(group.shard_for_training)),
    ):
        yield


class TimedPolicy(group.PolicyWorkerGroup):
    """The worker group, whose calls begin with dispatch; gathering ends where they return."""

    clock: Clock

    def compute_logprobs(self, *args: Any) -> Any:
        self.clock.enter("dispatch")
        scored = super().compute_logprobs(*args)
        self.clock.enter("elsewhere")
        return scored

    def train(self, *args: Any, **kwargs: Any) -> Any:
        self.clock.enter("dispatch")
        update = super().train(*args, **kwargs)
        self.clock.enter("elsewhere")
        return update


class TimedTripwires(StepTripwires):
    """The tripwires, whose check of a step is a phase."""

    clock: Clock

    def check(self, *args: Any) -> Any:
        self.clock.enter("tripwires")
        alarms = super().check(*args)
        self.clock.enter("elsewhere")
        return alarms


@dataclass(frozen=True, slots=True)
class PicklingHandle:
    """Stands for a worker's actor."""

    name: str
    is_leader: bool
    cluster: CountingCluster

    def submit(self, method: str, /, *args: Any) -> bytes:
        """Pickle the call; the result is the pickled answer, of which only a leader has one."""
        self.cluster.num_bytes += len(pickle.dumps((method, args), protocol=pickle.HIGHEST_PROTOCOL))
        return self.cluster.answers[method] if self.is_leader else pickle.dumps(None)


class CountingCluster:
    """Has every answer at once."""

    def __init__(self, clock: Clock, answers: Mapping[str, bytes]) -> None:
        self.answers = answers
        self.num_bytes = 0
        self.clock = clock

    def gather(self, calls: Sequence[bytes], **_: Any) -> list[Any]:
        """Unpickle the answers."""
        self.clock.enter("gathering")
        return [pickle.loads(call) for call in calls]

    def handles(self, layout: ParallelLayout) -> list[PicklingHandle]:
        """One per worker."""
        places = map(layout.coordinates, range(layout.world_size))
        return [PicklingHandle(f"policy-{place.rank}", place.is_leader, self) for place in places]


def components(cfg: Config, cluster: CountingCluster, batch: KVBatchMeta) -> Components:
    """The policy worker group is real; the other parts have their answers ready."""
    layout = parallel_layout(cfg.policy)
    # Stand-ins that have what the worker group calls, and no more.
    workers, stand_in = cast("list[ActorHandle]", cluster.handles(layout)), cast("Cluster", cluster)
    policy = TimedPolicy(
        workers,
        stand_in,
        cfg.policy,
        num_epochs=1,
        deadline_s=lambda stage: 0.0,
    )
    tripwires = TimedTripwires(cfg, RunFacts(has_experts=False, num_prompts=len(batch)), lambda text: None)
    policy.clock = tripwires.clock = cluster.clock
    parts = mock.Mock()
    parts.weight_sync.digest = None
    parts.checkpoints.found = None
    parts.partitions.take_operations.return_value = ()
    parts.rollout.next_part.return_value = RolloutResult(batch, METRICS, 1.0, 1.0, 1.0, operations=())
    parts.sampler.next.side_effect = lambda count: tuple(range(count))
    parts.weight_sync.ensure_version.return_value = {}
    parts.checkpoints.resume.return_value = RunPosition()
    return Components(
        partitions=parts.partitions,
        rollout=parts.rollout,
        policy=policy,
        value=None,
        teacher=None,
        weight_sync=parts.weight_sync,
        schedule=RolloutSchedule(
            cfg,
            partitions=parts.partitions,
            rollout=parts.rollout,
            weight_sync=parts.weight_sync,
            sampler=parts.sampler,
            journal=parts.journal,
            settles_after=lambda step: False,
        ),
        validation_sets=(),
        logger=parts.logger,
        observer=parts.observer,
        checkpoints=parts.checkpoints,
        stop_requests=parts.stop_requests,
        recovery=parts.recovery,
        tripwires=tripwires,
    )


if __name__ == "__main__":
    sys.exit(main())
