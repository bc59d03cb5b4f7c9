"""Checks what the machine must have: CPUs, GPUs, disk, files, credentials."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.data.data_rules import data_problems
from nemo_like.data_plane.storage_kind import data_plane_machine_problems
from nemo_like.environments.registry import kind_of
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.logger_rules import logger_machine_problems, logger_problems
from nemo_like.plan.plan import weight_bytes
from nemo_like.plan.roles import ray_cpus, roles
from nemo_like.policy.options import Device
from nemo_like.rollout.tasks import used_environments

# Room for the logs, metrics, learning curve and W&B files of one run.
_RUN_DIRECTORY_BYTES = 100_000_000


class Machine(Enum):
    """The machine for which a configuration is checked.

    It is ``another`` when a run is only planned here, on a login node or a laptop that could not run it.
    """

    this = "this"
    another = "another"


def machine_problems(cfg: Config, machine: Machine = Machine.this) -> Iterator[Problem]:
    """Yield everything that the machine lacks for the run; of another machine, only what is known here."""
    yield from _processors(cfg)
    if machine is Machine.this:
        yield from _present_gpus(cfg)
        if cfg.cluster.address is None:  # otherwise storage and actors are on the cluster's machines
            yield from data_plane_machine_problems(cfg.data_plane)
        for name, env in used_environments(cfg).items():
            kind = kind_of(env)
            is_here = cfg.cluster.address is None or kind.is_asked_here
            if is_here and kind.machine_problems is not None:
                yield from kind.machine_problems(name, env)
        yield from _log_directory(cfg)
        yield from logger_machine_problems(cfg.logger)
    yield from data_problems(cfg.data, must_be_here=machine is Machine.this)
    yield from logger_problems(cfg.logger)


def _processors(cfg: Config) -> Iterator[Problem]:
    if cfg.cluster.address is not None:
        return  # the cluster's own resources are checked when it is joined
    needed, num_cpus = ray_cpus(cfg), cfg.cluster.num_cpus
    if num_cpus is not None and num_cpus < needed:
        yield Problem(
            key=f"cluster.num_cpus={num_cpus}",
            rule=f"must be at least {needed}: {_cpus_by_role(cfg)}",
            remedy=f"try {needed} or null; these are logical CPUs and may exceed the machine's cores",
        )


def _present_gpus(cfg: Config) -> Iterator[Problem]:
    if cfg.cluster.address is not None or cfg.policy.device is not Device.cuda:
        return
    num_gpus = cfg.cluster.gpus_per_node
    present = present_gpus()
    if num_gpus > present and not Path("/dev/dxg").exists():
        yield Problem(
            key=f"cluster.gpus_per_node={num_gpus}",
            rule=f"is more than the {present} NVIDIA GPUs of this machine",
            remedy="run on a GPU machine, join one's Ray with cluster.address, or use policy.device=cpu",
        )


def present_gpus() -> int:
    """Return the number of NVIDIA GPUs of this machine, according to its device files."""
    return len(list(Path("/dev").glob("nvidia[0-9]*")))


def _cpus_by_role(cfg: Config) -> str:
    """Return how many logical CPUs each kind of process needs, as "TransferQueue controller 1 x 1, ..."."""
    asked = {role: (needs.count, needs.num_cpus) for role, needs in roles(cfg).items()}
    return ", ".join(
        f"{role.value}{'s' * (n != 1)} {n} x {each:g}" for role, (n, each) in asked.items() if each
    )


def _log_directory(cfg: Config) -> Iterator[Problem]:
    key = f"logger.log_dir={cfg.logger.log_dir}"
    directory = Path(cfg.logger.log_dir).absolute()
    existing = next(path for path in (directory, *directory.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        rule = f"cannot be written, because {existing} is not a directory or not writable"
        yield Problem(key=key, rule=rule, remedy="choose another directory")
        return
    free = shutil.disk_usage(existing).free
    needed = _RUN_DIRECTORY_BYTES + _export_bytes(cfg)
    if free < needed:
        yield Problem(
            key=key,
            rule=f"needs {needed / 1e9:.1f} GB, but its disk has {free / 1e9:.1f} GB free",
            remedy="free some space, choose another disk, or set checkpointing.export_final_hf=false",
        )


def _export_bytes(cfg: Config) -> int:
    """Return the bytes of RUN_DIR/final_hf; 0 without an export, or when the model cannot be read yet."""
    try:
        model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
        return weight_bytes(cfg, model) * cfg.checkpointing.export_final_hf
    except ConfigError:
        return 0
