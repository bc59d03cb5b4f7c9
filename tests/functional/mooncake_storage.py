"""Whole runs whose storage is Mooncake, where the machine can run it."""

from __future__ import annotations

from nemo_like.data_plane.storage_kinds.mooncake_cpu import missing_mooncake_libraries
from tests.lacking import fall_back


def in_mooncake() -> str:
    """Return the argument for storage in Mooncake; say so where the machine lacks what that needs, and return
    the one for simple storage."""
    if missing := missing_mooncake_libraries():
        fall_back(f"the storage is simple here; Mooncake needs {', '.join(missing.values())}")
        return "data_plane.backend=simple"
    return "data_plane.backend=mooncake_cpu"
