"""Makes the storages of the shipped kinds, and the stores of their clients.

Each function imports its storage's module when it is called. This module itself imports neither numpy nor
torch nor TransferQueue: it says how a process imports them, with which environment variables and without
waste.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_like.cluster.imports import lasting_imports, unmarked_for_compiler

if TYPE_CHECKING:
    from nemo_like.cluster.actors import Call
    from nemo_like.data_plane.client import Store
    from nemo_like.data_plane.host import Storage
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


def import_storage() -> None:
    """Import TransferQueue and the packages that it needs, torch among them.

    Every process that needs TransferQueue calls this before it imports ``data_plane.transfer_queue``. A
    storage process calls it first of all, since Ray, which then imports the actor's class, would take longer.
    """
    with lasting_imports(), unmarked_for_compiler():
        importlib.import_module("transfer_queue")


def in_memory_storage(cfg: DataPlaneConfig, log_path: str | None) -> Storage:
    """Make the storage that is in the host's own process."""
    from nemo_like.data_plane.memory_storage import InMemoryStorage

    return InMemoryStorage()


def in_memory_store(host: Any, client_id: str, addresses: Any, failure: Callable[[], Call]) -> Store:
    """Make a client's store, which asks the host for each value."""
    from nemo_like.data_plane.memory_storage import HostStore

    return HostStore(host)


def simple_storage(cfg: DataPlaneConfig, log_path: str | None) -> Storage:
    """Make TransferQueue with its own storage units."""
    return _transfer_queue(cfg, log_path, has_mooncake=False)


def mooncake_storage(cfg: DataPlaneConfig, log_path: str | None) -> Storage:
    """Make TransferQueue with Mooncake's storage units."""
    return _transfer_queue(cfg, log_path, has_mooncake=True)


def transfer_queue_store(host: Any, client_id: str, addresses: Any, failure: Callable[[], Call]) -> Store:
    """Make a client's store of TransferQueue, for either kind of storage units."""
    os.environ.update(TRANSFER_QUEUE_ENVIRONMENT)
    import_storage()
    from nemo_like.data_plane.transfer_queue import TransferQueueStore

    return TransferQueueStore(addresses, client_id, failure().ref.future())


def _transfer_queue(cfg: DataPlaneConfig, log_path: str | None, *, has_mooncake: bool) -> Storage:
    import_storage()
    from nemo_like.data_plane.transfer_queue import TransferQueueStorage

    logs = log_path.removesuffix(".log") if log_path else None
    return TransferQueueStorage(cfg, logs, has_mooncake=has_mooncake)
