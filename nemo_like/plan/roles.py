"""Lists the processes of a run: how many there are of each role, and what each needs.

No other module decides this: the start-up code, the validation and ``--dry-run`` all read it here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from nemo_like.configuration import Config
from nemo_like.data_plane.storage_kind import storage_kind_of
from nemo_like.driver.options import asks_endpoint
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import needs_gpu
from nemo_like.policy.groups.layout import policy_world_size
from nemo_like.policy.options import Device, WorkerGroupConfig
from nemo_like.rollout.tasks import used_environments


class Role(Enum):
    """What a process of a run is for."""

    driver = "driver"
    data_plane_host = "data-plane host"
    controller = "TransferQueue controller"
    storage_unit = "TransferQueue storage unit"
    rollout = "rollout actor"
    environment = "environment actor"
    reward_model = "reward model on a GPU"
    engine = "vLLM engine"
    engine_part = "part of a vLLM engine"
    endpoint = "client of a server"
    policy_worker = "policy worker"
    value_worker = "value worker"
    teacher_worker = "teacher worker"

    @property
    def group(self) -> str:
        """The group of keys that configures the workers of this role, such as ``value``."""
        return self.name.removesuffix("_worker")


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleNeeds:
    """The number of processes of a role, the logical CPUs that each asks Ray for, and the GPUs that each
    uses.

    Engines and training workers may use the same GPUs; ``plan.places`` says which.
    """

    count: int
    num_cpus: float
    num_gpus: int = 0


def roles(cfg: Config) -> dict[Role, RoleNeeds]:
    """Return the number and the needs of a run's processes by role, in the order in which data passes the
    roles.

    A replay has no engines and no environments. A run that only generates has no policy workers. A run that
    asks a server has a client of the server instead of engines. An engine over several nodes has a part on
    each node but its first.
    """
    on_gpu, generates = cfg.policy.device is Device.cuda, cfg.rollout.replay is None
    vllm = cfg.generation.vllm_cfg
    engine_size, num_parts = vllm.workers_per_node, vllm.num_nodes - 1
    num_engines = cfg.generation.num_engines if generates and not asks_endpoint(cfg.evaluation) else 0
    engine = RoleNeeds(count=num_engines, num_cpus=engine_size, num_gpus=engine_size if on_gpu else 0)
    environments = [*used_environments(cfg).values()] if generates else []
    has_units = storage_kind_of(cfg.data_plane.backend).has_units
    num_units = cfg.data_plane.num_storage_units if has_units else 0
    return {
        Role.driver: RoleNeeds(count=1, num_cpus=0),
        Role.data_plane_host: RoleNeeds(count=1, num_cpus=0),
        # TransferQueue itself asks for one CPU for its controller and for each storage unit.
        Role.controller: RoleNeeds(count=min(num_units, 1), num_cpus=1),
        Role.storage_unit: RoleNeeds(count=num_units, num_cpus=1),
        Role.rollout: RoleNeeds(count=1, num_cpus=0),
        Role.environment: RoleNeeds(
            count=sum(env.num_actors for env in environments if not needs_gpu(env)), num_cpus=0.1
        ),
        **_reward_models([env for env in environments if needs_gpu(env)]),
        Role.engine: engine,
        **({Role.engine_part: replace(engine, count=num_engines * num_parts)} if num_parts > 0 else {}),
        **({Role.endpoint: RoleNeeds(count=1, num_cpus=0)} if asks_endpoint(cfg.evaluation) else {}),
        Role.policy_worker: RoleNeeds(count=0, num_cpus=1),
        **{
            role: RoleNeeds(count=policy_world_size(group), num_cpus=1, num_gpus=1 if on_gpu else 0)
            for role, group in worker_groups(cfg).items()
        },
    }


def _reward_models(environments: Sequence[EnvConfig]) -> dict[Role, RoleNeeds]:
    """Return the needs of environments whose actors have a GPU each; empty without such environments."""
    if not environments:
        return {}
    count = sum(env.num_actors for env in environments)
    return {Role.reward_model: RoleNeeds(count=count, num_cpus=1, num_gpus=1)}


def worker_groups(cfg: Config) -> dict[Role, WorkerGroupConfig]:
    """Return the configuration of each training worker group of a run, by the role of its workers.

    The policy comes first, then the critic and the teacher if the run has them. Empty when a run only
    generates.
    """
    if cfg.rollout.generate_only:
        return {}
    others = {Role.value_worker: cfg.value, Role.teacher_worker: cfg.teacher}
    return {
        Role.policy_worker: cfg.policy,
        **{role: group for role, group in others.items() if group is not None},
    }


def actor_name(role: Role, needs: RoleNeeds, index: int | str) -> str:
    """Return the actor name of the ``index``-th process of ``role``, or the role's own name when it has one
    process.

    For environments, ``index`` is a name and a number, such as "math-0".
    """
    return role.name if needs.count == 1 else f"{role.name}-{index}"


def engine_actors(cfg: Config, index: int) -> list[tuple[Role, str]]:
    """Return role and actor name of the ``index``-th engine's process on each of its nodes; the first is the
    engine itself."""
    needs, num_nodes = roles(cfg), cfg.generation.vllm_cfg.num_nodes
    parts = [(Role.engine_part, f"{index}-{node}") for node in range(1, num_nodes)]
    named: list[tuple[Role, int | str]] = [(Role.engine, index), *parts]
    return [(role, actor_name(role, needs[role], label)) for role, label in named]


def environment_role(env: EnvConfig) -> Role:
    """Return how many actors an environment has, with the CPUs and GPUs that each of them needs."""
    return Role.reward_model if needs_gpu(env) else Role.environment


def ray_cpus(cfg: Config) -> int:
    """Return the logical CPUs for which all actors ask together; with fewer, Ray would wait forever."""
    return math.ceil(round(sum(needs.count * needs.num_cpus for needs in roles(cfg).values()), 6))
