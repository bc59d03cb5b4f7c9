"""How a process imports TransferQueue: with which environment variables, and without waste.

This module itself imports neither numpy nor torch nor TransferQueue.
"""

from __future__ import annotations

import importlib

from nemo_like.cluster.imports import lasting_imports, unmarked_for_compiler

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


def import_storage() -> None:
    """Import TransferQueue and the packages that it needs, torch among them.

    Every process that needs TransferQueue calls this before it imports ``data_plane.transfer_queue``. A
    storage process calls it first of all, since Ray, which then imports the actor's class, would take longer.
    """
    with lasting_imports(), unmarked_for_compiler():
        importlib.import_module("transfer_queue")
