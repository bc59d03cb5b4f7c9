"""The data plane over many steps: nothing of them stays."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from nemo_like.batch.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.cluster.actors import ActorSpec, start_actor
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.spec import DataPlaneSpec
from tests.functional.data_plane_fixtures import (
    CONTROLLER,
    SIMPLE_UNIT,
    TransferQueuePlanes,
    data_plane_config,
    started,
    storage_processes,
)

NUM_GROUPS, GROUP_SIZE, LENGTH = 16, 8, 250
MIB = 1 << 20


@pytest.fixture(scope="module")
def planes(private_ray: None) -> Iterator[TransferQueuePlanes]:
    cfg = data_plane_config("simple", timeout_s=2.0, max_open_partitions=2)
    with started("run-steps", cfg) as planes:
        yield planes


class Stepper:
    """Producer and consumer of whole steps, in a process of its own; the target of an actor."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        self._host, self._timeout_s = spec.host, spec.timeout_s
        self._rollout, self._worker = connect(spec), connect(spec)

    def pid(self) -> int:
        return os.getpid()

    def run(self, first: int, num_steps: int) -> None:
        for step in range(first, first + num_steps):
            self._step(f"train-{step}")
        gc.collect()

    def _step(self, partition: str) -> None:
        self._ask("open_partition", partition, (*ROLLOUT_COLUMNS, *POLICY_COLUMNS))
        lengths = [LENGTH] * (NUM_GROUPS * GROUP_SIZE)
        num_tokens = sum(lengths)
        meta = self._rollout.put(
            partition,
            {
                "input_ids": np.ones(num_tokens, np.int32),
                "response_mask": np.ones(num_tokens, np.uint8),
                "generation_logprobs": np.ones(num_tokens, np.float32),
            },
            lengths=lengths,
            chunk_sizes=[GROUP_SIZE] * NUM_GROUPS,
            tags={"reward": [1.0] * len(lengths)},
        )
        self._worker.clear(meta.slice(0, 3 * GROUP_SIZE))
        meta = meta.slice(3 * GROUP_SIZE, len(meta))
        self._worker.fetch(meta, ["input_ids", "generation_logprobs"])
        self._worker.write(meta, {"prev_logprobs": np.ones(sum(meta.lengths), np.float32)})
        self._rollout.fetch(meta, ["prev_logprobs", "response_mask"])
        self._worker.forget(partition)
        self._ask("close_partition", partition)

    def _ask(self, method: str, *args: object) -> None:
        self._host.submit(method, *args).result(self._timeout_s + 10)


def memory_after(planes: TransferQueuePlanes, windows: tuple[int, ...]) -> list[dict[str, int]]:
    """Resident bytes of every process of the data plane, after each window of so many steps."""
    target = "tests.functional.test_data_plane_steps:Stepper"
    stepper = start_actor(ActorSpec("stepper", target, kwargs={"spec": planes.spec}, num_cpus=0))
    processes = {"client": stepper.submit("pid").result(60), "host": planes.host.process_id().result(60)}
    for name in (CONTROLLER, SIMPLE_UNIT):
        (processes[name],) = storage_processes(name)
    seen, done = [], 0
    for num_steps in windows:
        stepper.submit("run", done, num_steps).result(600)
        done += num_steps
        seen.append({name: psutil.Process(pid).memory_info().rss for name, pid in processes.items()})
    assert planes.num_stored_keys() == 0
    stepper.kill()
    return seen


@pytest.mark.slow
def test_two_hundred_steps_leave_nothing_behind(planes: TransferQueuePlanes) -> None:
    warm, end = memory_after(planes, (50, 150))
    step_bytes = NUM_GROUPS * GROUP_SIZE * LENGTH * 13
    for name, rss in end.items():
        # A step's bytes, were they kept once, would make 62 MB.
        assert rss - warm[name] < 8 * MIB + step_bytes, name


@pytest.mark.slow
def test_a_thousand_steps_leave_nothing_behind(planes: TransferQueuePlanes) -> None:
    warm, middle, end = memory_after(planes, (200, 400, 400))
    for name in end:
        assert end[name] - warm[name] < 12 * MIB, name
        assert end[name] - middle[name] < 6 * MIB, name
