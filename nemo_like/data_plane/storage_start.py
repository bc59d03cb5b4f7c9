"""Makes the storages of the shipped kinds, and the stores of their clients.

Each function imports its module when it is called. ``import_storage``, which loads torch, comes before
TransferQueue's.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from nemo_like.cluster.actors import Call
from nemo_like.data_plane.options import DataPlaneConfig
from nemo_like.data_plane.storage_import import TRANSFER_QUEUE_ENVIRONMENT, import_storage

if TYPE_CHECKING:
    from nemo_like.data_plane.client import Store
    from nemo_like.data_plane.host import Storage


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
