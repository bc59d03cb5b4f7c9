"""``DataPlaneSpec``, by which a process reaches the run's data plane, and the spec of the host's actor.

This module imports neither numpy nor torch nor TransferQueue.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.compat.worker_start import MAY_BE_FORKED
from nemo_like.data_plane.options import DataPlaneConfig
from nemo_like.data_plane.storage_import import TRANSFER_QUEUE_ENVIRONMENT


@dataclass(frozen=True, slots=True, kw_only=True)
class DataPlaneSpec:
    """Everything that a process needs to connect; it can be pickled."""

    host: ActorHandle  # the run's DataPlaneHost
    backend: str  # data_plane.backend
    timeout_s: float  # deadline of one put, write, fetch or clear
    start_timeout_s: float  # deadline of connecting, which waits for the storage to be up
    is_observed: bool  # whether the clients note their operations, for ``take_operations``


def host_actor(
    cfg: DataPlaneConfig, *, run_id: str, start_timeout_s: float, log_path: str | None = None
) -> ActorSpec:
    """Return the spec of the host's actor, which starts the storage's processes and has the catalogue."""
    return ActorSpec(
        name="data_plane",
        target="nemo_like.data_plane.host:start_host",
        kwargs={"cfg": cfg, "run_id": run_id, "start_timeout_s": start_timeout_s, "log_path": log_path},
        num_cpus=0.0,
        env=TRANSFER_QUEUE_ENVIRONMENT | MAY_BE_FORKED,
        concurrency=Concurrency.asyncio,
        log_path=log_path,
    )
