"""Which processes a run has at this moment, by what they do in it."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

import psutil

from tests.functional.runs import MARK


class Role(Enum):
    """Children are what an actor started itself: an engine's workers, an environment's, Mooncake's master."""

    driver = "driver"
    terminal = "terminal"  # the whole process group, as by keys pressed in the terminal
    engine = "engine"
    engine_child = "engine_child"
    policy_worker = "policy_worker"
    rollout = "rollout"
    environment = "environment"
    environment_child = "environment_child"
    data_plane = "data_plane"
    data_plane_child = "data_plane_child"
    controller = "controller"
    storage_unit = "storage_unit"
    gcs = "gcs"
    raylet = "raylet"
    agent = "agent"  # of Ray
    helper = "helper"  # anything else, such as W&B's service


_BY_TITLE = {
    "ray::TransferQueueController": Role.controller,
    "StorageUnit": Role.storage_unit,
    "gcs_server": Role.gcs,
    "raylet/raylet": Role.raylet,
    "ray::DashboardAgent": Role.agent,
    "ray::RuntimeEnvAgent": Role.agent,
}


def processes_by_role(mark: str, run_dir: Path, driver: int) -> dict[Role, list[psutil.Process]]:
    """Live processes of the run, the oldest first."""
    found: dict[Role, list[psutil.Process]] = {}
    for process in sorted(psutil.process_iter(), key=lambda one: one.pid):
        try:
            if process.environ().get(MARK) != mark or process.status() == psutil.STATUS_ZOMBIE:
                continue
            role = Role.driver if process.pid == driver else _role(process, run_dir)
        except (psutil.NoSuchProcess, psutil.AccessDenied, OSError):
            continue
        found.setdefault(role, []).append(process)
    return found


def _role(process: psutil.Process, run_dir: Path) -> Role:
    title = " ".join(process.cmdline()).strip()
    for part, role in _BY_TITLE.items():
        if part in title:
            return role
    # An actor and its children write to the actor's log.
    log = Path(os.readlink(f"/proc/{process.pid}/fd/2"))
    if log.parent != run_dir / "logs":
        return Role.helper
    is_actor = title.startswith("ray::")
    return Role[log.stem.partition("-")[0] + ("" if is_actor else "_child")]


def choose(
    found: dict[Role, list[psutil.Process]], role: Role, pick: float
) -> tuple[Role, psutil.Process] | None:
    """The process of the role that ``pick`` in [0, 1) names; where there is none, one of all processes."""
    candidates = [(role, process) for process in found.get(role, ())]
    candidates = candidates or [(one, process) for one, those in found.items() for process in those]
    return candidates[int(pick * len(candidates))] if candidates else None
