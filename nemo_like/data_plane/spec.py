"""What a process has to know to reach the run's data plane, and the spec of the actor behind it.

This module imports neither numpy nor torch nor TransferQueue.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.cluster.imports import lasting_imports, unmarked_for_compiler
from nemo_like.data_plane.options import DataPlaneConfig

# TransferQueue reads these when it is imported. They keep its own deadline and retries out of the way of
# ours: a retry after a long silence would only repeat what a live storage unit has queued already.
TRANSFER_QUEUE_ENVIRONMENT = {
    "TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT": "3600",
    "TQ_SIMPLE_STORAGE_MAX_ATTEMPTS": "1",
    "TQ_NUM_THREADS": "1",
    "TQ_LOGGING_LEVEL": "ERROR",
    # Mooncake, which TransferQueue imports, reads these.
    "MC_LOG_LEVEL": "ERROR",
    "MC_STORE_CLIENT_METRIC": "0",
    # Each retry takes several seconds, and a master that is gone does not come back.
    "MC_STORE_CLIENT_SETUP_RETRIES": "3",
}


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
        env=TRANSFER_QUEUE_ENVIRONMENT,
        concurrency=Concurrency.asyncio,
        log_path=log_path,
    )


def import_storage() -> None:
    """Import TransferQueue and ``data_plane.transfer_queue``, without waste.

    Every process calls this that needs them, before it imports them. A storage process calls it first of all;
    Ray, which imports the actor's class next, would take longer.
    """
    with lasting_imports(), unmarked_for_compiler():
        importlib.import_module("nemo_like.data_plane.transfer_queue")
