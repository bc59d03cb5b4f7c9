"""The part of a rollout actor that both kinds share: clear samples in the data plane, and reconnect to it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.connection import connect, reconnect
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec


class DataPlaneUser:
    """The base class of rollout actors, which holds their connection to the data plane."""

    def __init__(self, data_plane: DataPlaneSpec) -> None:
        self._data_plane_spec, self._data_plane = data_plane, connect(data_plane)

    async def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        """Clear samples that will not train; return the data-plane operations that this took."""
        for batch in batches:
            await asyncio.to_thread(self._data_plane.clear, batch)
        return self._data_plane.take_operations()

    def _move_to(self, data_plane: DataPlaneSpec) -> None:
        """Use this data plane from now on, unless it is the present one."""
        if data_plane != self._data_plane_spec:
            self._data_plane = reconnect(self._data_plane, data_plane)
            self._data_plane_spec = data_plane
