"""Assigns a node and GPUs to each process that uses GPUs: training workers, engines and reward models.

The rules, ``--dry-run`` and the start-up code all read the same ``placement``. On CPUs, workers and engines
get only a node. Nodes and GPUs are numbered; which machines and devices they are is known once Ray has
reserved them.

Training workers that exchange data in every layer share a node: a tensor- and context-parallel group must,
and the ranks that together hold all experts do where a node has enough GPUs. All GPUs of an engine are on one
node too, or in equal shares on as many nodes as its configuration says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from nemo_like.cluster.options import Placement
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import needs_gpu
from nemo_like.generation.options import WeightTransport
from nemo_like.plan.derived import shares_gpus, weight_transport
from nemo_like.plan.roles import Role, RoleNeeds, actor_name, engine_actors, roles, worker_groups
from nemo_like.policy.backends.backend_kind import axis_size, backend_kind_of
from nemo_like.policy.groups.layout import stage_size
from nemo_like.policy.options import Device, WorkerGroupConfig
from nemo_like.rollout.tasks import used_environments


@dataclass(frozen=True, slots=True)
class Place:
    """The node and the GPUs of one process."""

    actor: str
    role: Role
    node: int
    gpus: tuple[int, ...]  # in the process's own order; none on CPUs

    @property
    def rank(self) -> int:
        """The index of the process within its role."""
        return int(self.actor.rpartition("-")[2]) if "-" in self.actor else 0


def placement(cfg: Config) -> list[Place]:
    """Return the place of every training worker, engine and, on GPUs, reward model, in this order.

    The workers of a group are in the order of their ranks. Raises ConfigError when the GPUs of
    ``cluster.num_nodes`` nodes do not suffice, or when engines cannot be spread over nodes.
    """
    _check_spread(cfg)
    return _on_gpus(cfg) if cfg.policy.device is Device.cuda else _on_cpus(cfg)


def gpus_by_node(places: Iterable[Place]) -> dict[int, int]:
    """Return how many GPUs of each node the processes use, for nodes with at least one of the processes."""
    used: dict[int, set[int]] = {}
    for place in places:
        used.setdefault(place.node, set()).update(place.gpus)
    return {node: len(used[node]) for node in sorted(used)}


def weight_replicas(cfg: Config, places: Sequence[Place]) -> tuple[int, ...]:
    """Return the data-parallel replicas that send weights to engines; in general only the first.

    Engines that map the trainer's memory need a sender on their own node, so each node with engines has a
    replica whose senders are all on this node. Raises ConfigError when a node has none.
    """
    transport, workers = weight_transport(cfg), roles(cfg)[Role.policy_worker]
    if transport not in (WeightTransport.shared_memory, WeightTransport.cuda_ipc) or not workers.count:
        return (0,)
    node_of = {place.actor: place.node for place in places}
    num_stages, group = axis_size(cfg.policy, "pp"), _tensor_group(cfg.policy)
    whole: dict[int, int] = {}  # by node, the first replica whose senders are all on it
    for replica in range(cfg.policy.data_parallel_size):
        senders = (stage * workers.count // num_stages + replica * group for stage in range(num_stages))
        nodes = {node_of[actor_name(Role.policy_worker, workers, rank)] for rank in senders}
        if len(nodes) == 1:
            whole.setdefault(nodes.pop(), replica)
    with_engines = {place.node for place in places if place.role is Role.engine}
    if without := sorted(with_engines - whole.keys()):
        raise ConfigError.of(
            f"generation.weight_transport={transport.value}",
            "needs a whole replica of the policy on each node with engines, which map memory of their own "
            f"node; node {without[0]} has none (cluster.placement={cfg.cluster.placement.value})",
            "use cluster.placement=separate with weight_transport=auto, or fewer pipeline stages",
        )
    return tuple(sorted(whole[node] for node in with_engines)) or (0,)


def _on_cpus(cfg: Config) -> list[Place]:
    """Spread the worker groups evenly over the nodes, and likewise the engines."""
    needs, num_nodes = roles(cfg), cfg.cluster.num_nodes
    engines = needs[Role.engine]
    places: list[Place] = []
    nodes: list[int] = []  # of the policy's tensor groups
    for role, group in worker_groups(cfg).items():
        workers, size = needs[role], _tensor_group(group)
        num_groups = workers.count // size
        nodes_of_role = [_share_of(number, num_groups, num_nodes) for number in range(num_groups)]
        places += [
            Place(actor_name(role, workers, rank), role, nodes_of_role[rank // size], ())
            for rank in range(workers.count)
        ]
        nodes = nodes or nodes_of_role
    by_groups = cfg.cluster.placement is Placement.colocated and bool(nodes)
    for index in range(engines.count):
        node = nodes[index % len(nodes)] if by_groups else _share_of(index, engines.count, num_nodes)
        further = range(cfg.generation.vllm_cfg.num_nodes)
        places += _engine(cfg, index, [((node + number) % num_nodes, ()) for number in further])
    return places


def _engine(cfg: Config, index: int, where: Sequence[tuple[int, tuple[int, ...]]]) -> list[Place]:
    """Return the places of an engine's process on each of its nodes, which come with their GPUs."""
    return [Place(name, role, *at) for (role, name), at in zip(engine_actors(cfg, index), where, strict=True)]


def _share_of(index: int, count: int, num_nodes: int) -> int:
    """Return the node of item ``index`` of ``count`` items, spread over the nodes in equal runs."""
    return index * num_nodes // count


def _on_gpus(cfg: Config) -> list[Place]:
    needs, engines = roles(cfg), roles(cfg)[Role.engine]
    free_gpus = _FreeGpus(cfg.cluster.gpus_per_node)
    places: list[Place] = []
    for role in worker_groups(cfg):
        if role is Role.policy_worker or cfg.cluster.placement is not Placement.colocated:
            places += _on_own_gpus(cfg, role, free_gpus)
        else:
            places += _on_policy_gpus(cfg, role, places)
    size, num_nodes = cfg.generation.vllm_cfg.workers_per_node, cfg.generation.vllm_cfg.num_nodes
    _check_fits(
        cfg, _engine_key(cfg), size if engines.count else 0, ", or generation.vllm_cfg.num_nodes to more"
    )
    if shares_gpus(cfg):
        places += _on_workers_gpus(cfg, places[: needs[Role.policy_worker].count], engines)
    else:
        for index in range(engines.count):
            where: dict[int, tuple[int, ...]] = {}
            for _ in range(num_nodes):
                where |= [free_gpus.take(size, where)]
            places += _engine(cfg, index, [*where.items()])
    places += [Place(name, Role.reward_model, *free_gpus.take(1)) for name in reward_models(cfg)]
    _check_nodes(cfg, free_gpus.num_nodes)
    return places


def reward_models(cfg: Config) -> dict[str, EnvConfig]:
    """Return the environment of each actor whose reward model has a GPU, by actor name; empty in a replay."""
    needs = roles(cfg).get(Role.reward_model)
    if needs is None:
        return {}
    return {
        actor_name(Role.reward_model, needs, f"{name}-{index}"): env
        for name, env in used_environments(cfg).items()
        if needs_gpu(env)
        for index in range(env.num_actors)
    }


def _on_own_gpus(cfg: Config, role: Role, free_gpus: _FreeGpus) -> list[Place]:
    """Give each worker of a group a GPU of its own."""
    workers, group = roles(cfg)[role], worker_groups(cfg)[role]
    size = _node_group(cfg, role)
    by_rank: dict[int, Place] = {}
    for first in _first_ranks(cfg, group, workers.count, size):
        node, gpus = free_gpus.take(size)
        for rank, gpu in enumerate(gpus, start=first):
            by_rank[rank] = Place(actor_name(role, workers, rank), role, node, (gpu,))
    return [by_rank[rank] for rank in range(workers.count)]


def _on_policy_gpus(cfg: Config, role: Role, policy: Sequence[Place]) -> list[Place]:
    """Give each worker of a group the GPU of the policy worker that has the same rank."""
    workers, size = roles(cfg)[role], _tensor_group(worker_groups(cfg)[role])
    if workers.count > len(policy):
        raise ConfigError.of(
            f"{role.group}.data_parallel_size={worker_groups(cfg)[role].data_parallel_size}",
            f"makes {workers.count} {role.value}s, but with cluster.placement=colocated they share the GPUs "
            f"of {len(policy)} policy workers",
            "use a layout of at most as many, or cluster.placement=separate",
        )
    nodes = [place.node for place in policy]
    if any(len(set(nodes[first : first + size])) > 1 for first in range(0, workers.count, size)):
        raise ConfigError.of(
            _tensor_key(role.group, worker_groups(cfg)[role]),
            "puts workers that exchange something in every layer on several nodes, since with "
            "cluster.placement=colocated each has the GPU of the policy worker of its rank",
            "use the policy's tensor- and context-parallel sizes, or cluster.placement=separate",
        )
    return [
        Place(actor_name(role, workers, rank), role, policy[rank].node, policy[rank].gpus)
        for rank in range(workers.count)
    ]


def _first_ranks(cfg: Config, group: WorkerGroupConfig, num_workers: int, size: int) -> list[int]:
    """Return the first rank of each run of ``size`` workers, in the order in which the runs get GPUs.

    When engines share the GPUs, the pipeline stages of a replica are neighbours, so that they are on one
    node.
    """
    firsts = list(range(0, num_workers, size))
    if shares_gpus(cfg):
        per_stage = num_workers // axis_size(group, "pp")
        firsts.sort(key=lambda first: (first % per_stage, first))
    return firsts


class _FreeGpus:
    """Nodes of equal size, whose GPUs are taken in order; a new node is added when none has enough left."""

    def __init__(self, gpus_per_node: int) -> None:
        self._size = gpus_per_node
        self._taken: list[int] = []

    @property
    def num_nodes(self) -> int:
        return len(self._taken)

    def take(self, count: int, without: Collection[int] = ()) -> tuple[int, tuple[int, ...]]:
        """Take ``count`` GPUs of the first node that has them left, and is none of ``without``; return the
        node and the GPUs."""
        rooms = [self._size - taken for taken in [*self._taken, 0]]
        node = next(node for node, room in enumerate(rooms) if room >= count and node not in without)
        self._taken += [0] * (node == len(self._taken))
        first = self._taken[node]
        self._taken[node] += count
        return node, tuple(range(first, first + count))


def _on_workers_gpus(cfg: Config, workers: Sequence[Place], engines: RoleNeeds) -> list[Place]:
    """Spread the engines over the workers' GPUs; with more engines than GPUs, several share a GPU."""
    size = cfg.generation.vllm_cfg.num_workers
    used = gpus_by_node(workers)
    slots = [
        (node, tuple(range(first, first + size)))
        for node, count in used.items()
        for first in range(0, count - size + 1, size)
    ]
    if not slots:
        most = max(used.values())
        raise ConfigError.of(
            _engine_key(cfg),
            f"must be at most {most} with cluster.placement=colocated: the policy workers have no more GPUs "
            "on one node",
            f"try {most}",
        )
    chosen = [
        slots[index * len(slots) // engines.count if engines.count < len(slots) else index % len(slots)]
        for index in range(engines.count)
    ]
    return [place for index, at in enumerate(chosen) for place in _engine(cfg, index, [at])]


def _engine_key(cfg: Config) -> str:
    """Return the settings that say how many GPUs an engine has."""
    vllm = cfg.generation.vllm_cfg
    stages = vllm.pipeline_parallel_size
    by = f" x pipeline_parallel_size={stages}" if stages > 1 else ""
    over = f" over num_nodes={vllm.num_nodes}" if vllm.num_nodes > 1 else ""
    return f"generation.vllm_cfg.tensor_parallel_size={vllm.tensor_parallel_size}{by}{over}"


def _node_group(cfg: Config, role: Role) -> int:
    """Return how many consecutive workers of a group are placed on one node together."""
    group = worker_groups(cfg)[role]
    size = _tensor_group(group)
    _check_fits(cfg, _tensor_key(role.group, group), size)
    with_experts = math.lcm(size, axis_size(group, "ep") * axis_size(group, "etp"))
    fits = with_experts <= cfg.cluster.gpus_per_node and stage_size(group) % with_experts == 0
    return with_experts if fits else size


def _tensor_group(policy: WorkerGroupConfig) -> int:
    """Return how many consecutive workers of a group wait for each other in every layer."""
    return axis_size(policy, "tp") * axis_size(policy, "cp")


def _tensor_key(name: str, group: WorkerGroupConfig) -> str:
    axes, contexts = backend_kind_of(group).axes, axis_size(group, "cp")
    key = axes.get("tp", "data_parallel_size")
    by = f" x {axes['cp'].rpartition('.')[2]}={contexts}" if contexts > 1 else ""
    return f"{name}.{key}={attrgetter(key)(group)}{by}"


def _check_spread(cfg: Config) -> None:
    num_nodes = cfg.generation.vllm_cfg.num_nodes
    key = f"generation.vllm_cfg.num_nodes={num_nodes}"
    if num_nodes == 1 or not roles(cfg)[Role.engine].count:
        return
    if num_nodes > (most := cfg.cluster.num_nodes):
        raise ConfigError.of(key, f"must be at most cluster.num_nodes={most}", "give the run more nodes")
    if shares_gpus(cfg):
        raise ConfigError.of(
            key,
            "must be 1 with cluster.placement=colocated: engines that share GPUs with the policy map "
            "memory of a policy worker on their own node",
            "use cluster.placement=separate",
        )


def _check_fits(cfg: Config, key: str, size: int, or_set: str = "") -> None:
    most = cfg.cluster.gpus_per_node
    if size > most:
        rule = f"must be at most cluster.gpus_per_node={most}, since its {size} GPUs share a node"
        remedy = "divide it over fewer GPUs, or set cluster.gpus_per_node to what a node has"
        raise ConfigError.of(key, rule, remedy + or_set)


def _check_nodes(cfg: Config, needed: int) -> None:
    cluster = cfg.cluster
    if needed > cluster.num_nodes:
        needs = roles(cfg)
        parts = [f"{needs[Role.policy_worker].count} policy workers of 1 GPU"]
        if cluster.placement is not Placement.colocated:
            others = (role for role in worker_groups(cfg) if role is not Role.policy_worker)
            parts += [f"{needs[role].count} {role.value}s of 1" for role in others]
        if not shares_gpus(cfg):
            parts.append(f"{needs[Role.engine].count} engines of {cfg.generation.vllm_cfg.num_workers}")
        if scorers := len(reward_models(cfg)):
            parts.append(f"{scorers} reward models of 1")
        users = " and ".join(parts)
        raise ConfigError.of(
            f"cluster.num_nodes={cluster.num_nodes}",
            f"must be at least {needed}: {users} do not fit on fewer nodes of "
            f"cluster.gpus_per_node={cluster.gpus_per_node}",
            f"use fewer engines or policy workers, or cluster.num_nodes={needed}",
        )
