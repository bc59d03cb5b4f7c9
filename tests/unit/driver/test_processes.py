from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_like.cluster.actors import ActorSpec
from nemo_like.cluster.stage import EngineHolds
from nemo_like.configuration import load_config
from nemo_like.driver.processes import Starter
from nemo_like.models.remote_code import code_environment
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.plan.places import placement
from tests.unit.config.checkpoints import DEMO


class Handle:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self._events = name, events

    def watch(self) -> str:
        return self.name

    def submit(self, method: str, *args: Any) -> str:
        told = ", ".join(argument.value for argument in args if isinstance(argument, EngineHolds))
        return f"{self.name} {method} {told}".strip()


class FakeCluster:
    """Records what is started and waited for, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.specs: list[ActorSpec] = []

    def endpoint(self, actor: str, *, timeout_s: float) -> tuple[str, int]:
        return f"node of {actor}", 29500

    def watch(self, handle: Handle, call: str) -> None:
        self.events.append(f"{handle.name} ends with {call}")

    def discard(self, handle: Handle) -> None:
        self.events.append(f"discard {handle.name}")

    def start(self, spec: Any) -> Handle:
        node = spec.kwargs.get("node")
        self.specs.append(spec)
        where = f" as {node.rank} at {node.address}:{node.port}" if node else ""
        self.events.append(f"start {spec.name}{where}")
        return Handle(spec.name, self.events)

    def gather(self, calls: Sequence[str], **_: Any) -> list[None]:
        self.events += calls
        return [None] * len(calls)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory.create(str(tmp_path / "runs"), "run")


def started(directory: RunDirectory, tmp_path: Path, *overrides: str) -> tuple[list[str], list[str]]:
    cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", *overrides])
    cluster = FakeCluster()
    starter: Any = Starter(cfg, cluster, directory, placement(cfg))  # type: ignore[arg-type]
    engines = starter.engines(range(cfg.generation.num_engines))
    return [engine.name for engine in engines], cluster.events


def test_engines_on_one_gpu_start_when_those_before_them_sleep(
    directory: RunDirectory, tmp_path: Path
) -> None:
    shared = ("policy.device=cuda", "cluster.placement=colocated", "cluster.gpus_per_node=2")
    names, events = started(
        directory, tmp_path, *shared, "policy.data_parallel_size=2", "generation.num_engines=3"
    )
    assert names == ["engine-0", "engine-1", "engine-2"]
    assert events == [
        *("start engine-0", "start engine-1", "engine-0 stats", "engine-1 stats"),
        *("engine-0 hold nothing", "engine-1 hold nothing"),
        *("start engine-2", "engine-2 stats", "engine-2 hold nothing"),
    ]


def test_an_engine_whose_weights_are_wanted_as_it_has_read_them_stays_awake(
    directory: RunDirectory, tmp_path: Path
) -> None:
    shared = ("policy.device=cuda", "cluster.placement=colocated", "cluster.gpus_per_node=1")
    one_of_each = ("policy.data_parallel_size=1", "generation.num_engines=1")
    cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", *shared, *one_of_each])
    cluster = FakeCluster()
    starter: Any = Starter(cfg, cluster, directory, placement(cfg))  # type: ignore[arg-type]
    starter.engines([0], then_sleep=False)
    assert cluster.events == ["start engine", "engine stats"]


def test_engines_with_resources_of_their_own_start_side_by_side(
    directory: RunDirectory, tmp_path: Path
) -> None:
    names, events = started(directory, tmp_path, "generation.num_engines=2")
    assert names == ["engine-0", "engine-1"]
    assert events == ["start engine-0", "start engine-1"]


def test_an_engine_starts_with_its_parts_on_further_nodes_and_again_in_their_place(
    directory: RunDirectory, tmp_path: Path
) -> None:
    vllm = ("generation.vllm_cfg.tensor_parallel_size=2", "generation.vllm_cfg.num_nodes=2")
    cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", *vllm, "cluster.num_nodes=2"])
    cluster = FakeCluster()
    starter: Any = Starter(cfg, cluster, directory, placement(cfg))  # type: ignore[arg-type]
    starter.engines([0, 1])
    assert cluster.events == [
        "start engine_part-0-1 as 1 at node of engine-0:29500",
        "start engine-0 as 0 at node of engine-0:29500",
        "engine-0 ends with engine_part-0-1",
        "start engine_part-1-1 as 1 at node of engine-1:29500",
        "start engine-1 as 0 at node of engine-1:29500",
        "engine-1 ends with engine_part-1-1",
    ]
    cluster.events.clear()
    starter.engines([1])
    assert cluster.events[0] == "discard engine_part-1-1"
    assert cluster.events[1].startswith("start engine_part-1-1 as 1")


def test_processes_are_told_of_trusted_code_and_each_copies_it_for_itself(
    directory: RunDirectory, tmp_path: Path
) -> None:
    allowed = ("policy.trust_remote_code=true", "policy.external_lib=[own, other]")
    cfg = load_config(DEMO, [f"policy.model_name={tmp_path}", *allowed])
    cluster = FakeCluster()
    starter: Any = Starter(cfg, cluster, directory, placement(cfg))  # type: ignore[arg-type]
    starter.engines([0, 1])
    told = [code_environment(cfg.policy, directory.path / "checkpoint_code" / f"engine-{i}") for i in (0, 1)]
    assert told[0] != told[1]
    for spec, own in zip(cluster.specs, told, strict=True):
        assert own.items() <= spec.env.items()
