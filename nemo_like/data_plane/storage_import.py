"""How a process imports TransferQueue: with which environment variables, and without waste.

This module itself imports neither numpy nor torch nor TransferQueue.
"""

from __future__ import annotations

import importlib

from ray._private import ray_constants

from nemo_like.cluster.imports import lasting_imports, unmarked_for_compiler
from nemo_like.compat.worker_start import MAY_BE_FORKED

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

# What TransferQueue imports, for ``ForkServer``. TransferQueue itself defines actors of Ray, whose ids must
# not be drawn before a fork, and imports Mooncake, which starts threads.
FORKED_IMPORTS = ("tensordict", "zmq.auth.thread", "nemo_like.data_plane.host")

# A storage process keeps the memory of one step for the next: to get fresh pages from the kernel costs more
# than to fill them.
_STORAGE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


def import_storage() -> None:
    """Import TransferQueue and the packages that it needs, torch among them.

    Every process that needs TransferQueue calls this before it imports ``data_plane.transfer_queue``. A
    storage process calls it first of all, since Ray, which then imports the actor's class, would take longer.
    """
    with lasting_imports(), unmarked_for_compiler():
        importlib.import_module("transfer_queue")


# Ray calls the function in a storage process before it loads the actor's class.
STORAGE_ENVIRONMENT = {
    **TRANSFER_QUEUE_ENVIRONMENT,
    **_STORAGE_MEMORY,
    **MAY_BE_FORKED,
    ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR: (
        f"{import_storage.__module__}.{import_storage.__name__}"
    ),
}
