"""The description of a kind of storage behind the data plane; each kind is one file that makes one.

storage_kinds/simple.py    KIND = StorageKind(about=..., storage="module:function", store=...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_like.config.problems import Problem
from nemo_like.data_plane.options import STORAGE_KINDS, DataPlaneConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageKind:
    """A kind of storage.

    about: what holds the bytes.
    storage: import path of ``(cfg, log_path) -> data_plane.host.Storage``, called in the host's process.
    store: import path of ``(host, client_id, addresses, failure) -> data_plane.client.Store``, called in a
        client's process; ``failure`` asks the host's actor to answer why the storage failed, once it does.
    problems: yields which keys of ``data_plane`` do not fit together.
    machine_problems: yields what the storage needs and this machine lacks.
    has_units: ``num_storage_units`` processes of its own hold the bytes.
    """

    about: str
    storage: str
    store: str
    problems: Callable[[DataPlaneConfig], Iterator[Problem]] | None = None
    machine_problems: Callable[[DataPlaneConfig], Iterator[Problem]] | None = None
    has_units: bool = True


def storage_kind_of(name: str) -> StorageKind:
    """Return the description of the storage that ``data_plane.backend`` names."""
    kind: StorageKind = STORAGE_KINDS.load(name)
    return kind


def data_plane_problems(plane: DataPlaneConfig) -> Iterator[Problem]:
    """Yield every problem with keys of data_plane that do not fit together."""
    of_kind = storage_kind_of(plane.backend).problems
    return iter(()) if of_kind is None else of_kind(plane)


def data_plane_machine_problems(plane: DataPlaneConfig) -> Iterator[Problem]:
    """Yield everything that the storage needs and this machine lacks."""
    of_kind = storage_kind_of(plane.backend).machine_problems
    return iter(()) if of_kind is None else of_kind(plane)
