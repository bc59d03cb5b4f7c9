"""What the processes of a run that load torch have in common: their environment, and the server that forks
them."""

from __future__ import annotations

from nemo_like.cluster.cpu_environment import CPU_ENVIRONMENT
from nemo_like.cluster.fork_server import ForkServer, Imports
from nemo_like.compat.worker_start import MAY_BE_FORKED
from nemo_like.configuration import Config
from nemo_like.data_plane.storage_import import FORKED_IMPORTS, STORAGE_ENVIRONMENT
from nemo_like.generation.environment import CPU_IMPORTS, engine_environment, unused_by_engines
from nemo_like.plan.roles import Role, roles, worker_groups
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.groups.layout import is_one_engine
from nemo_like.policy.options import Device


def fork_server(cfg: Config) -> ForkServer | None:
    """Describe the server that forks the run's processes; None where they compute on GPUs, or below a Ray
    that exists already."""
    if cfg.policy.device is not Device.cpu or cfg.cluster.address is not None:
        return None
    imports, needs = [], roles(cfg)
    if Role.engine in needs:
        imports.append(Imports(CPU_IMPORTS, unused_by_engines(cfg.policy.device)))
    imports.append(Imports(FORKED_IMPORTS))
    if Role.rollout in needs:
        imports.append(Imports(["nemo_like.rollout.sync_rollout"]))
    for group in worker_groups(cfg).values():
        if not is_one_engine(group):
            kind = backend_kind_of(group)
            modules = ["nemo_like.policy.workers.worker", kind.backend.partition(":")[0]]
            imports.append(Imports(modules, list(kind.imported_without)))
    num_nodes = cfg.generation.vllm_cfg.num_nodes
    environment = engine_environment(cfg.policy.device, num_nodes) | torch_environment(cfg)
    return ForkServer(imports, environment | STORAGE_ENVIRONMENT)


def torch_environment(cfg: Config) -> dict[str, str]:
    """Return the environment variables of processes that load torch."""
    # Processes with GPUs get theirs with their place.
    env = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    if cfg.policy.device is Device.cpu:
        env |= {**CPU_ENVIRONMENT, **MAY_BE_FORKED}
    if cfg.cluster.address is None:
        env["GLOO_SOCKET_IFNAME"] = "lo"
    return env
