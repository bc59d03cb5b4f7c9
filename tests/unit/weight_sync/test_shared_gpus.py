"""A run's order of start, wake, push, KV cache, sleep, offload and onload, on GPUs of 80 GiB that only count.

The engines' memory behaves as vLLM's: an engine takes its share when it starts, and must find it free; it
sleeps as a whole. The policy's behaves as ``policy.parking``: what is offloaded is on the GPU during calls
that use it. The sizes are those of the plan, so that the test also shows that nothing exceeds it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.cluster.stage import EngineHolds, Stage
from nemo_like.configuration import Config, load_config
from nemo_like.generation.engine_spec import Sleeps
from nemo_like.generation.sleep import EngineMemory
from nemo_like.observability.metrics import Metric
from nemo_like.plan.derived import keeps_weights_asleep
from nemo_like.plan.memory_timetable import (
    CONTEXT_BYTES,
    GIB,
    WORKER_CONTEXT_BYTES,
    MemoryTimetable,
    gpu_stages,
    memory_timetable,
)
from nemo_like.plan.run_models import run_models
from nemo_like.weight_sync.sync import EngineWeights, SharedGpus
from tests.unit.config.checkpoints import REPOSITORY

SIZE = 80 * GIB
GPU = (0, 0)
SLEEPS = {True: Sleeps.keeping_weights, False: Sleeps.losing_weights}
OFFLOADS = ("policy.offload_optimizer_for_logprob=true", "policy.offload_parameters_between_phases=true")


class OutOfMemory(Exception):
    pass


@dataclass
class Gpu:
    """Memory that is counted; ``peaks`` has the most that was held in each stage."""

    stage: Stage = Stage.engine_start
    held: dict[str, int] = field(default_factory=dict)
    peaks: dict[Stage, int] = field(default_factory=dict)
    is_measured: bool = False  # an engine starts, and nobody else may take or give up memory

    def take(self, name: str, size: int) -> None:
        assert name not in self.held
        if sum(self.held.values()) + size > SIZE:
            raise OutOfMemory(f"{name} needs {size / GIB:.1f} GiB beside {self.held}")
        self.held[name] = size
        self.peaks[self.stage] = max(self.peaks.get(self.stage, 0), sum(self.held.values()))

    def give(self, name: str) -> None:
        del self.held[name]


class Engine:
    """vLLM's ``LLMEngine`` as far as memory goes: ``asleep`` is what it never gives up, ``graphs`` what comes
    back with the weights."""

    def __init__(self, gpu: Gpu, name: str, weights: int, share: int, asleep: int, graphs: int) -> None:
        self.gpu, self.name, self.weights, self.share = gpu, name, weights, share
        self.asleep, self.graphs = asleep, graphs
        if sum(gpu.held.values()) + share > SIZE:
            raise OutOfMemory(f"{name} finds less free than its {share / GIB:.1f} GiB")
        gpu.take(f"{name} weights", weights)
        gpu.take(f"{name} KV", share - weights)

    def sleep(self, level: int) -> None:
        self.gpu.give(f"{self.name} weights")
        self.gpu.give(f"{self.name} KV")
        self.gpu.take(f"{self.name} asleep", self.asleep)

    def wake_up(self, tags: list[str]) -> None:
        if tags == ["weights"]:
            self.gpu.take(f"{self.name} weights", self.weights)
            self.gpu.take(f"{self.name} graphs", self.graphs)
        else:
            self.gpu.give(f"{self.name} asleep")
            self.gpu.give(f"{self.name} graphs")
            self.gpu.take(f"{self.name} KV", self.share - self.weights)


class Policy:
    """One policy worker: what is offloaded between phases is there during the calls that use it."""

    def __init__(self, gpu: Gpu, cfg: Config, sizes: Mapping[Stage, Mapping[str, int]]) -> None:
        self.gpu, self.cfg, self.sizes = gpu, cfg, sizes
        gpu.stage = Stage.policy_start
        gpu.take("policy context", WORKER_CONTEXT_BYTES)
        gpu.take("policy buckets", sizes[Stage.policy_training]["buckets"])
        self.leaves = {
            "weights": cfg.policy.offload_parameters_between_phases,
            "gradients": cfg.policy.offload_optimizer_for_logprob,
            "optimizer": cfg.policy.offload_optimizer_for_logprob,
        }
        for part, leaves in self.leaves.items():
            if not leaves:
                gpu.take(f"policy {part}", sizes[Stage.policy_training][part])

    @contextlib.contextmanager
    def call(self, stage: Stage, used: tuple[str, ...], extra: str) -> Iterator[None]:
        self.gpu.stage = stage
        taken = [part for part in used if self.leaves[part]]
        for part in taken:
            self.gpu.take(f"policy {part}", self.sizes[stage][part])
        self.gpu.take(f"policy {extra}", self.sizes[stage][extra])
        yield
        for part in (*taken, extra):
            self.gpu.give(f"policy {part}")


class Run:
    """The colocated run of a configuration on its first GPU, driven through the real parts that order it."""

    def __init__(self, cfg: Config, timetable: MemoryTimetable) -> None:
        self.gpu = Gpu()
        self.version, self.cfg = 0, cfg
        by_stage = timetable.by_gpu[GPU]
        self.engine_names = [actor for actor in timetable.actors(GPU) if actor.startswith("engine")]
        start, sync, asleep = (
            {(one.actor, one.what): one.num_bytes for one in by_stage[stage]}
            for stage in (Stage.engine_start, Stage.weight_sync, Stage.logprobs)
        )
        self.start_engine: Callable[[str], EngineMemory] = lambda name: EngineMemory(
            Engine(
                self.gpu,
                name,
                start[name, "weights"],
                start[name, "weights"] + start[name, "KV cache and work space"],
                asleep[name, "context"] + asleep[name, "token counts"],
                sync.get((name, "graphs"), 0),
            ),
            SLEEPS[keeps_weights_asleep(cfg)],
        )
        self.engines: dict[str, EngineMemory] = {}
        for name in self.engine_names:
            self.engines[name] = self.start_engine(name)
            self.engines[name].hold(EngineHolds.nothing)
        sizes = {
            stage: {one.what: one.num_bytes for one in held if one.actor.startswith("policy")}
            for stage, held in by_stage.items()
        }
        self.policy = Policy(self.gpu, cfg, sizes)
        shared = SharedGpus(self.hold, keeps_weights=keeps_weights_asleep(cfg))
        self.sync = EngineWeights(self.push, shared)

    def hold(self, what: EngineHolds) -> None:
        stage = {
            EngineHolds.nothing: Stage.logprobs,
            EngineHolds.weights: Stage.weight_sync,
            EngineHolds.everything: Stage.generation,
        }[what]
        if what is not EngineHolds.nothing:  # else the stage begins when all have given theirs up
            self.gpu.stage = stage
        for engine in self.engines.values():
            engine.hold(what)
        self.gpu.stage = stage

    def push(self, version: int) -> dict[str, Metric]:
        with self.policy.call(Stage.weight_sync, ("weights",), "tensor to send"):
            for engine in self.engines.values():
                assert engine.holds is EngineHolds.weights
                engine.weights_came()
        return {}

    def generate(self) -> None:
        self.sync.ensure_version(self.version)
        assert all(engine.holds is EngineHolds.everything for engine in self.engines.values())
        self.sync.end_generation()

    def train(self) -> None:
        with self.policy.call(Stage.logprobs, ("weights",), "activations"):
            pass
        parts = ("weights", "gradients", "optimizer")
        with self.policy.call(Stage.policy_training, parts, "activations"):
            self.version += 1

    def lose_an_engine(self) -> None:
        """While all generate; the step begins again with a new one."""
        self.sync.ensure_version(self.version)
        name = self.engine_names[0]
        for part in [part for part in self.gpu.held if part.startswith(name)]:
            self.gpu.give(part)
        self.gpu.stage = Stage.generation
        self.engines[name] = self.start_engine(name)
        self.engines[name].hold(EngineHolds.nothing)
        self.sync.forget()


@cache
def planned(*overrides: str) -> tuple[Config, MemoryTimetable]:
    """Qwen3-8B on eight GPUs that engines and policy share, and its plan."""
    layout = ("cluster.placement=colocated", "policy.data_parallel_size=2", "generation.num_engines=8")
    cfg = load_config(REPOSITORY / "recipes" / "grpo-qwen3-8b-1n8g.yaml", [*layout, *overrides])
    return cfg, memory_timetable(cfg, run_models(cfg), SIZE)


CASES = {
    "all offloaded": OFFLOADS,
    "weights stay": (OFFLOADS[0], "generation.vllm_cfg.gpu_memory_utilization=0.8"),
    "nothing offloaded": ("generation.vllm_cfg.gpu_memory_utilization=0.5",),
    "weights sent as changes": (*OFFLOADS, "generation.weight_delta=true"),
    "two engines on a GPU": (
        *OFFLOADS,
        *("generation.num_engines=16", "generation.vllm_cfg.gpu_memory_utilization=0.4"),
    ),
}


@pytest.mark.parametrize("overrides", CASES.values(), ids=CASES)
def test_a_run_holds_at_most_what_the_plan_says_in_every_stage(overrides: tuple[str, ...]) -> None:
    cfg, timetable = planned(*overrides)
    run = Run(cfg, timetable)
    for _ in range(3):
        run.generate()
        run.train()
    run.generate()
    assert set(run.gpu.peaks) == set(gpu_stages(cfg))
    for stage, peak in run.gpu.peaks.items():
        assert peak <= timetable.bytes_in(GPU, stage) <= SIZE, stage
    assert run.gpu.peaks[Stage.policy_training] == timetable.bytes_in(GPU, Stage.policy_training)


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["generate", "train", "lose_an_engine"]), max_size=12), st.booleans())
def test_no_order_of_work_and_deaths_takes_more_than_there_is(work: list[str], is_delta: bool) -> None:
    """Nor has any engine generate with weights that it lost, which its memory refuses."""
    cfg, timetable = planned(*OFFLOADS, f"generation.weight_delta={str(is_delta).lower()}")
    run = Run(cfg, timetable)
    for each in work:
        getattr(run, each)()
    assert max(run.gpu.peaks.values()) <= SIZE


def test_training_beside_engines_that_are_awake_is_what_does_not_fit() -> None:
    cfg, timetable = planned(*OFFLOADS)
    run = Run(cfg, timetable)
    run.sync.ensure_version(0)
    with pytest.raises(OutOfMemory):
        run.train()


def test_an_engine_that_starts_after_the_policy_finds_no_room() -> None:
    cfg, timetable = planned()
    held = timetable.by_gpu[GPU][Stage.policy_training]
    gpu = Gpu()
    Policy(gpu, cfg, {Stage.policy_training: {one.what: one.num_bytes for one in held}})
    with pytest.raises(OutOfMemory, match=r"finds less free than its 68\.0 GiB"):
        Engine(gpu, "engine-0", 16 * GIB, int(0.85 * SIZE), asleep=CONTEXT_BYTES, graphs=GIB)
