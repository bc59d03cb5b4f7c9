"""Where actors run: bundles of resources that are reserved together, each whole on one node.

What must share a node goes into one bundle; bundles spread over the nodes as far as there is room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.cluster.errors import ClusterError
from nemo_like.cluster.runtime import free_port


@dataclass(frozen=True, slots=True)
class Bundle:
    """Logical resources on one node, and the names of the actors they are for."""

    actors: tuple[str, ...]
    num_cpus: float
    num_gpus: float

    @property
    def resources(self) -> dict[str, float]:
        asked = {"CPU": self.num_cpus, "GPU": self.num_gpus}
        return {name: amount for name, amount in asked.items() if amount}

    def __str__(self) -> str:
        amounts = " and ".join(f"{amount:g} {name}s" for name, amount in self.resources.items())
        return f"{amounts} on one node for {', '.join(self.actors)}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """Bundles that are held for this run until ``release``."""

    bundles: tuple[Bundle, ...]
    group: PlacementGroup

    def options(self, actor: str) -> dict[str, Any]:
        """Of ``start_actor``, to start this actor in its bundle; empty for one that has none."""
        index = self._index(actor)
        if index is None:
            return {}
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}

    def nodes(self) -> dict[str, str]:
        """Node id by actor."""
        node_ids = ray.util.placement_group_table(self.group)["bundles_to_node_id"]
        return {actor: node_ids[i] for i, bundle in enumerate(self.bundles) for actor in bundle.actors}

    def endpoint(self, actor: str, timeout_s: float) -> tuple[str, int]:
        """Address of the actor's node and a TCP port that was free there a moment ago."""
        if self.nodes().get(actor) == ray.get_runtime_context().get_node_id():
            return _endpoint()
        probe = ray.remote(num_cpus=0)(_endpoint).options(**self.options(actor))
        return ray.get(probe.remote(), timeout=timeout_s)

    def release(self) -> None:
        """End what runs in the bundles; safe to call twice."""
        remove_placement_group(self.group)

    def _index(self, actor: str) -> int | None:
        return next((i for i, bundle in enumerate(self.bundles) if actor in bundle.actors), None)


def reserve(bundles: Sequence[Bundle], *, timeout_s: float) -> Reservation:
    """Hold all bundles, or none.

    Raises ClusterError when a bundle fits on no node, and when not all are free in time.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for bundle in bundles:
        if not any(_fits(bundle.resources, node) for node in nodes):
            raise ClusterError(f"no node has {bundle}; {_describe(nodes)}")
    group = placement_group([bundle.resources for bundle in bundles], strategy="SPREAD")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        asked = "; ".join(str(bundle) for bundle in bundles)
        raise ClusterError(
            f"Ray could not reserve the run's resources within {timeout_s:g} s: {asked}. {_describe(nodes)}, "
            "and other runs may hold some of it"
        )
    return Reservation(tuple(bundles), group)


def _fits(asked: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in asked.items())


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    has = [f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes]
    counts = ", ".join(f"{has.count(kind)} x {kind}" for kind in dict.fromkeys(has))
    return f"the Ray cluster's nodes have: {counts}"


def _endpoint() -> tuple[str, int]:
    return str(ray.util.get_node_ip_address()), free_port()
