"""The data plane's host itself, without TransferQueue: for debugging."""

from __future__ import annotations

from nemo_like.data_plane.storage_kind import StorageKind

KIND = StorageKind(
    about="the data plane's host itself, without TransferQueue: for debugging",
    storage="nemo_like.data_plane.storage_start:in_memory_storage",
    store="nemo_like.data_plane.storage_start:in_memory_store",
    has_units=False,
)
