"""Counts how much host memory of each node the processes that compute on GPUs take.

This is memory of parts that wait on the host while others use the GPUs, and memory of a checkpoint while it
is saved; all of it is counted as if it were needed at once. Not counted are the libraries of each process,
some gigabytes, and the data plane, whose size ``--dry-run`` prints separately.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.plan.derived import keeps_weights_asleep, shares_gpus
from nemo_like.plan.memory_timetable import GIB, GRAPH_BYTES, engine_draft, engine_weights
from nemo_like.plan.places import Place, placement
from nemo_like.plan.policy_memory import PolicyMemory, policy_memory
from nemo_like.plan.roles import Role, worker_groups
from nemo_like.plan.run_models import RunModels
from nemo_like.policy.groups.layout import adapters_of, further_models, is_one_engine, parks_optimizer
from nemo_like.policy.options import (
    Device,
    ReferencePlacement,
    TeacherConfig,
    TrainedGroupConfig,
    WorkerGroupConfig,
)

HostMemory = Mapping[int, Mapping[str, int]]  # by node: bytes by what takes them

_SLEEPING = "weights of engines that sleep"
_GRAPHS = "CUDA graphs of engines that sleep"
_PARKED = "what waits for its phase"
_KEPT = "weights that are kept"
_GATHERED = "moments gathered for a checkpoint"
_COPIED = "copy for a checkpoint in the background"
_REMEDIES = {
    _SLEEPING: "a larger generation.vllm_cfg.tensor_parallel_size",
    _GRAPHS: "generation.vllm_cfg.enforce_eager=true",
    _PARKED: "offload_optimizer_for_logprob=false or offload_parameters_between_phases=false",
    _KEPT: "reference_placement=swap_in_place",
    _GATHERED: "a larger tensor- or pipeline-parallel size over more nodes",
    _COPIED: "checkpointing.writing=blocking",
}


def host_memory(cfg: Config, models: RunModels) -> HostMemory:
    """Return the host memory that a run with ``models`` takes on each node; empty on CPUs."""
    if cfg.policy.device is Device.cpu:
        return {}
    taken: defaultdict[int, defaultdict[str, int]] = defaultdict(lambda: defaultdict(int))
    for place in placement(cfg):
        for what, num_bytes in _of_process(cfg, models, place):
            taken[place.node][what] += num_bytes
    needed = {node: {what: size for what, size in parts.items() if size} for node, parts in taken.items()}
    return {node: parts for node, parts in needed.items() if parts}


def host_bytes(cfg: Config) -> int | None:
    """Return the configured host memory of each node in bytes; None when the configuration does not say."""
    return None if cfg.cluster.host_memory_gib is None else int(cfg.cluster.host_memory_gib * GIB)


def format_host_memory(memory: HostMemory) -> list[str]:
    """Return a line per node for a terminal; empty on CPUs."""
    return [
        f"host memory  node {node}: at most {sum(parts.values()) / GIB:.1f} GiB: {_listed(parts)}"
        for node, parts in sorted(memory.items())
    ]


def host_memory_problems(cfg: Config, models: RunModels, size: int) -> Iterator[Problem]:
    """Yield a problem when the node that needs most needs more than ``size`` bytes."""
    fullest = max(host_memory(cfg, models).items(), key=lambda item: sum(item[1].values()), default=None)
    if fullest is None or sum(fullest[1].values()) <= size:
        return
    node, parts = fullest
    largest_first = sorted(parts, key=lambda what: -parts[what])
    yield Problem(
        key=f"cluster.host_memory_gib={size / GIB:.4g}",
        rule=(
            f"is too little: the processes on node {node} need {sum(parts.values()) / GIB:.1f} GiB of its "
            f"memory: {_listed(parts)}"
        ),
        remedy="try " + " or ".join(_REMEDIES[what] for what in largest_first),
    )


def _listed(parts: Mapping[str, int]) -> str:
    largest_first = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{what} {size / GIB:.1f}" for what, size in largest_first)


def _of_process(cfg: Config, models: RunModels, place: Place) -> Iterator[tuple[str, int]]:
    if place.role is Role.engine and shares_gpus(cfg):
        if keeps_weights_asleep(cfg):
            asleep = engine_weights(cfg, models[Role.policy_worker]) + engine_draft(cfg)
            yield _SLEEPING, asleep * len(place.gpus)
        if not cfg.generation.vllm_cfg.enforce_eager:
            yield _GRAPHS, GRAPH_BYTES * len(place.gpus)
    group = worker_groups(cfg).get(place.role)
    if group is not None and not is_one_engine(group):
        yield from _of_worker(cfg, group, policy_memory(group, models[place.role], place.rank))


def _of_worker(cfg: Config, group: WorkerGroupConfig, memory: PolicyMemory) -> Iterator[tuple[str, int]]:
    yield _PARKED, memory.on_host
    if group.offload_parameters_between_phases:
        yield _PARKED, memory.weights
    if parks_optimizer(group):
        yield _PARKED, memory.optimizer
    yield _KEPT, memory.weights * _num_kept(cfg, group)
    if cfg.checkpointing.enabled and isinstance(group, TrainedGroupConfig):
        yield _GATHERED, memory.gathered
        if cfg.checkpointing.writing is CheckpointWriting.background:
            yield _COPIED, memory.stored


def _num_kept(cfg: Config, group: WorkerGroupConfig) -> int:
    """Return how many copies of weights wait on the host until they score.

    With host_copy each has a second copy, which makes room for the weights that it replaces on the GPU.
    """
    num_models = 0
    if isinstance(group, TeacherConfig):
        num_models = len(further_models(group))
    elif group is cfg.policy and cfg.loss_fn.reference_policy_kl_penalty > 0 and adapters_of(group) is None:
        num_models = 1
    return num_models * (2 if group.reference_placement is ReferencePlacement.host_copy else 1)
