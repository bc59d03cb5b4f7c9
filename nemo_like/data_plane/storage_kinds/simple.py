"""TransferQueue's own storage units, reached over ZMQ."""

from __future__ import annotations

from nemo_like.data_plane.storage_kind import StorageKind

KIND = StorageKind(
    about="TransferQueue's own storage units, reached over ZMQ",
    storage="nemo_like.data_plane.storage_start:simple_storage",
    store="nemo_like.data_plane.storage_start:transfer_queue_store",
)
