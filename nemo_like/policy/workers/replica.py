"""Shares the leader's columns within a replica, and failures to fetch between all workers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.actor_errors import Overdue
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane import codec
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.storage_errors import DataPlaneError, DeadlineExceeded, StorageFailed


class Replica:
    """The workers that together hold one copy of the model, as one of these workers sees them.

    Every worker of the world must construct its own at the same point, since that makes process groups.
    """

    def __init__(self, coordinates: Coordinates, timeout_s: float) -> None:
        self._coordinates = coordinates
        layout = coordinates.layout
        self._world = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        everyone = [layout.coordinates(rank) for rank in range(layout.world_size)]
        for dp in range(layout.dp):
            members = [member for member in everyone if member.dp == dp]
            # gloo, since columns are shared from host memory to host memory.
            group = dist.new_group(
                [member.rank for member in members], backend="gloo", timeout=timedelta(seconds=timeout_s)
            )
            if dp == coordinates.dp:
                self._group = group
                self._size = len(members)
                self._leader = next(member.rank for member in members if member.is_leader)

    def agree(self, failure: DataPlaneError | None) -> None:
        """Raise on every worker when any worker has a failure; every worker of the world calls this.

        A worker that has a ``failure`` raises it. The others raise DeadlineExceeded when any worker missed a
        deadline, else StorageFailed when any worker's storage failed, else DataPlaneError.
        """
        severity = torch.tensor(_severity(failure))
        if self._coordinates.layout.world_size > 1:
            dist.all_reduce(severity, dist.ReduceOp.MAX, group=self._world)
        if failure is not None:
            raise failure
        if severity.item():
            kind = (DataPlaneError, StorageFailed, DeadlineExceeded)[severity.item() - 1]
            raise kind("another worker of the group could not fetch its samples")

    def share(
        self, columns: Sequence[Column], meta: KVBatchMeta, fetched: Mapping[str, ColumnData] | None
    ) -> dict[str, ColumnData]:
        """Return the leader's ``columns`` of the samples of ``meta`` on every worker of the replica.

        Only the leader passes ``fetched``. All columns travel in one broadcast. Where the metadata does not
        give their sizes (ragged columns and objects), a broadcast of the sizes goes before it.
        """
        if self._size == 1:
            assert fetched is not None
            return dict(fetched)
        lengths, num_prompts = meta.lengths, len(set(meta.prompt_index))
        wired: dict[str, np.ndarray] = {}
        if fetched is not None:
            wired = {
                column.name: codec.whole_to_wire(
                    column,
                    fetched[column.name],
                    lengths=lengths,
                    num_prompts=num_prompts,
                    partition=meta.partition,
                )
                for column in columns
            }
        shapes = {
            column.name: codec.wire_shape(column, lengths, num_prompts)
            for column in columns
            if column.is_dense
        }
        shapes |= self._packed_shapes([column for column in columns if not column.is_dense], wired)
        # Widest items first keeps every column aligned in the common buffer; packed rows want 16 bytes.
        ordered = sorted(columns, key=lambda column: -codec.alignment(column))
        sizes = [math.prod(shapes[column.name]) * codec.wire_dtype(column).itemsize for column in ordered]
        buffer = np.empty(sum(sizes), dtype=np.uint8)
        parts = {
            column.name: buffer[end - size : end]
            for column, size, end in zip(ordered, sizes, np.cumsum(sizes), strict=True)
        }
        for name, values in wired.items():
            parts[name][:] = values.reshape(-1).view(np.uint8)
        dist.broadcast(torch.from_numpy(buffer), src=self._leader, group=self._group)
        return {
            column.name: codec.whole_from_wire(
                column, parts[column.name].view(codec.wire_dtype(column)).reshape(shapes[column.name])
            )
            for column in columns
        }

    def _packed_shapes(
        self, columns: Sequence[Column], wired: Mapping[str, np.ndarray]
    ) -> dict[str, tuple[int, ...]]:
        """Return the wire shapes of columns whose sizes only the leader knows; it broadcasts them."""
        if not columns:
            return {}
        sizes = torch.tensor([wired[column.name].nbytes if wired else 0 for column in columns])
        dist.broadcast(sizes, src=self._leader, group=self._group)
        return {column.name: (size,) for column, size in zip(columns, sizes.tolist(), strict=True)}


def _severity(failure: DataPlaneError | None) -> int:
    if failure is None:
        return 0
    return 3 if isinstance(failure, Overdue) else 2 if isinstance(failure, StorageFailed) else 1
