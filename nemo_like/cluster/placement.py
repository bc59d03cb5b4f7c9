"""Where actors run: bundles of resources that are reserved together, each of them on a single node.

Actors that must share a node share a bundle; Ray spreads the bundles over the nodes as far as it can.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.runtime import free_port


@dataclass(frozen=True, slots=True)
class Bundle:
    """Logical resources on one node, and the names of the actors that will use them."""

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
class Node:
    """A machine of the Ray cluster."""

    node_id: str
    address: str


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
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=index)
        return {"scheduling_strategy": strategy}

    def endpoint(self, actor: str, timeout_s: float) -> tuple[str, int]:
        """Return the address of the actor's node and a TCP port that was free there a moment ago.

        Raises ray.exceptions.GetTimeoutError when the node does not answer in time.
        """
        if actor in self.nodes and self.nodes[actor].node_id == ray.get_runtime_context().get_node_id():
            return _endpoint()
        probe = ray.remote(num_cpus=0)(_endpoint).options(**self.options(actor))
        return ray.get(probe.remote(), timeout=timeout_s)

    def release(self) -> None:
        """Give the bundles back to Ray, which ends what still runs in them. Safe to call twice."""
        remove_placement_group(self.group)

    def _index(self, actor: str) -> int | None:
        return next((i for i, bundle in enumerate(self.bundles) if actor in bundle.actors), None)


def reserve(choices: Sequence[Sequence[Bundle]], *, timeout_s: float) -> Reservation:
    """Reserve all bundles of the first choice of which each bundle alone would fit on some node.

    Raises ClusterError when there is no such choice, or when its bundles are not all free in time.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    bundles = next((choice for choice in choices if _first_too_large(choice, nodes) is None), None)
    if bundles is None:
        too_large = _first_too_large(choices[-1], nodes)
        raise ClusterError(f"no node has {too_large}; {_describe(nodes)}")
    group = placement_group([bundle.resources for bundle in bundles], strategy="SPREAD")
    if not group.wait(timeout_s):
        remove_placement_group(group)
        asked = "; ".join(str(bundle) for bundle in bundles)
        raise ClusterError(
            f"Ray could not reserve the run's resources within {timeout_s:g} s: {asked}. {_describe(nodes)}, "
            "and other runs may hold some of it"
        )
    return Reservation(tuple(bundles), group, _nodes_by_actor(bundles, group))


def _nodes_by_actor(bundles: Sequence[Bundle], group: PlacementGroup) -> dict[str, Node]:
    node_ids = ray.util.placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: str(node["NodeManagerAddress"]) for node in ray.nodes()}
    return {
        actor: Node(node_ids[i], addresses[node_ids[i]])
        for i, bundle in enumerate(bundles)
        for actor in bundle.actors
    }


def _first_too_large(bundles: Sequence[Bundle], nodes: Sequence[Mapping[str, float]]) -> Bundle | None:
    return next((b for b in bundles if not any(_fits(b.resources, node) for node in nodes)), None)


def _fits(asked: Mapping[str, float], node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= amount for name, amount in asked.items())


def _describe(nodes: Sequence[Mapping[str, float]]) -> str:
    has = [f"{node.get('CPU', 0):g} CPUs and {node.get('GPU', 0):g} GPUs" for node in nodes]
    counts = ", ".join(f"{has.count(kind)} x {kind}" for kind in dict.fromkeys(has))
    return f"the Ray cluster's nodes have: {counts}"


def _endpoint() -> tuple[str, int]:
    return str(ray.util.get_node_ip_address()), free_port()
