"""Reserves nodes and whole GPUs for a run, and tells each actor where it runs.

A bundle is what one node gives to the run: CPUs, and GPUs that Ray lends to nobody else meanwhile. Ray does
not say which GPUs a bundle has, so a task that asks for all of them reports it once. The actors themselves
ask Ray for no GPU: each starts with ``CUDA_VISIBLE_DEVICES`` set to its GPUs of the bundle, so that several
actors can share a GPU and one actor can have several.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.c_compiler import REMEDY, compiling_problem
from nemo_like.cluster.runtime import free_port
from nemo_like.observability.gpu_usage import gpu_memory_bytes

_CONTAINER_LIMIT = Path("/sys/fs/cgroup/memory.max")
# Has Ray leave CUDA_VISIBLE_DEVICES alone in a process that asks it for no GPU.
_OWN_DEVICES = {"RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}


@dataclass(frozen=True, slots=True)
class Bundle:
    """Logical resources on one node, and the actors that will use them.

    ``actors`` has, by name, the GPUs of each actor as indexes among the ``num_gpus`` of the bundle.
    """

    actors: Mapping[str, tuple[int, ...]]
    num_cpus: float
    num_gpus: int

    @property
    def resources(self) -> dict[str, float]:
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in asked.items() if amount}

    def __str__(self) -> str:
        amounts = " and ".join(f"{amount:g} {name}s" for name, amount in self.resources.items())
        return f"{amounts} on one node for {', '.join(self.actors)}"


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU that is reserved."""

    device: str  # as in CUDA_VISIBLE_DEVICES: an index or a UUID on its node
    num_bytes: int | None  # its memory; None where NVIDIA's driver does not tell


@dataclass(frozen=True, slots=True)
class Node:
    """A machine of the Ray cluster, with the GPUs that are reserved on it for one bundle."""

    node_id: str
    address: str
    gpus: tuple[Gpu, ...] = ()
    memory_bytes: int | None = None  # of the whole node; None without GPUs


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bundles that are held for this run until ``release``."""

    bundles: tuple[Bundle, ...]
    group: PlacementGroup
    nodes: Mapping[str, Node]  # by actor; not updated when a node dies and Ray moves its bundles

    def options(self, actor: str) -> dict[str, Any]:
        """Return the options with which ``start_actor`` starts this actor in its bundle; {} without one."""
        index = self._index(actor)
        if index is None:
            return {}
        return {"scheduling_strategy": _in_bundle(self.group, index)}

    def environment(self, actor: str) -> dict[str, str]:
        """Return the environment variables that give this actor its GPUs; {} without any."""
        index = self._index(actor)
        devices = self.bundles[index].actors[actor] if index is not None else ()
        if not devices:
            return {}
        gpus = self.nodes[actor].gpus
        visible = ",".join(gpus[index].device for index in devices)
        return {"CUDA_VISIBLE_DEVICES": visible, **_OWN_DEVICES}

    def endpoint(self, actor: str, timeout_s: float) -> tuple[str, int]:
        """Return the address of the actor's node and a TCP port that was free there a moment ago.

        Raises ray.exceptions.GetTimeoutError when the node does not answer in time.
        """
        if actor in self.nodes and self.nodes[actor].node_id == ray.get_runtime_context().get_node_id():
            return _endpoint()
        probe = ray.remote(num_cpus=0)(_endpoint).options(**self.options(actor))
        return ray.get(probe.remote(), timeout=timeout_s)

    def release(self) -> None:
        """Give the bundles back to Ray, which ends the actors that still run in them. Safe to call twice."""
        remove_placement_group(self.group)

    def _index(self, actor: str) -> int | None:
        return next((i for i, bundle in enumerate(self.bundles) if actor in bundle.actors), None)


def reserve(bundles: Sequence[Bundle], *, timeout_s: float) -> Reservation:
    """Reserve all bundles, on different nodes as far as Ray can.

    Raises ClusterError when a bundle fits on no node, when the bundles are not all free in time, or when a
    node with GPUs of the run cannot compile C.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    too_large = next((b for b in bundles if not any(_fits(b.resources, node) for node in nodes)), None)
    if too_large is not None:
        raise ClusterError(
            f"no node has {too_large}; {_describe(nodes)}; set cluster.num_nodes and cluster.gpus_per_node "
            "to what there is"
        )
    group = placement_group([bundle.resources for bundle in bundles], strategy="SPREAD")
    try:
        if not group.wait(timeout_s):
            asked = "; ".join(str(bundle) for bundle in bundles)
            raise ClusterError(
                f"Ray could not reserve the run's resources within {timeout_s:g} s: {asked}. "
                f"{_describe(nodes)}, and other runs may hold some of it"
            )
        return Reservation(tuple(bundles), group, _nodes_by_actor(bundles, group, timeout_s))
    except BaseException:
        remove_placement_group(group)
        raise


def _nodes_by_actor(bundles: Sequence[Bundle], group: PlacementGroup, timeout_s: float) -> dict[str, Node]:
    node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    nodes = [Node(node_ids[i], addresses[node_ids[i]]) for i in range(len(bundles))]
    asked = {i: _ask_for_gpus(group, i, bundle) for i, bundle in enumerate(bundles) if bundle.num_gpus}
    reports: list[_NodeReport] = ray.get(list(asked.values()), timeout=timeout_s)
    check_compilers({nodes[i].address: report.problem for i, report in zip(asked, reports, strict=True)})
    for i, report in zip(asked, reports, strict=True):
        nodes[i] = replace(nodes[i], gpus=report.gpus, memory_bytes=report.memory_bytes)
    return {actor: nodes[i] for i, bundle in enumerate(bundles) for actor in bundle.actors}


def check_compilers(problems: Mapping[str, str | None]) -> None:
    """Raise ClusterError where a node cannot compile C. ``problems`` has the reason, or None, by address."""
    if failing := [f"node {address}: {problem}" for address, problem in problems.items() if problem]:
        raise ClusterError(
            f"{'; '.join(failing)}. Triton, which engines use on GPUs, compiles C when it starts: {REMEDY}"
        )


@dataclass(frozen=True, slots=True)
class _NodeReport:
    """The GPUs that a bundle has on a node, the node's memory, and why it cannot compile C, if it can't."""

    gpus: tuple[Gpu, ...]
    memory_bytes: int
    problem: str | None


def _ask_for_gpus(group: PlacementGroup, index: int, bundle: Bundle) -> ray.ObjectRef:
    """Start a task that takes all GPUs of a bundle and reports them."""
    task = ray.remote(num_cpus=0, num_gpus=bundle.num_gpus, max_retries=0)(_node_report)
    return task.options(scheduling_strategy=_in_bundle(group, index)).remote()


def _node_report() -> _NodeReport:
    devices = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    sizes = gpu_memory_bytes()
    known = sizes if len(sizes) == len(devices) else [None] * len(devices)
    gpus = tuple(Gpu(device, size) for device, size in zip(devices, known, strict=True))
    return _NodeReport(gpus, _memory_bytes(), compiling_problem())


def _memory_bytes() -> int:
    """Return this node's memory, or what this process's container may use of it."""
    total = psutil.virtual_memory().total
    with suppress(OSError, ValueError):  # there is none, or it says "max"
        return min(total, int(_CONTAINER_LIMIT.read_text()))
    return total


def _in_bundle(group: PlacementGroup, index: int) -> PlacementGroupSchedulingStrategy:
    return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)


def _fits(asked: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in asked.items())


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    has = [f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes]
    counts = ", ".join(f"{has.count(kind)} x {kind}" for kind in dict.fromkeys(has))
    return f"the Ray cluster's nodes have: {counts}"


def node_address() -> str:
    """Return the address under which other nodes reach this one."""
    return str(ray.util.get_node_ip_address())


def _endpoint() -> tuple[str, int]:
    return node_address(), free_port()
