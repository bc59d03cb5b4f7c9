"""One replica's workers share what its leader fetched, as tensors; all replicas, whether it came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from nemo_like.batch.columns import Column
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.errors import Overdue
from nemo_like.data_plane.errors import DataPlaneError, DeadlineExceeded


class Replica:
    """The workers that hold one copy of the model between them.

    Every worker of the world constructs it at the same point, since that makes process groups.
    """

    def __init__(self, coordinates: Coordinates, timeout_s: float) -> None:
        self._coordinates = coordinates
        layout = coordinates.layout
        self._world = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
        everyone = [layout.coordinates(rank) for rank in range(layout.world_size)]
        for dp in range(layout.dp):
            members = [place for place in everyone if place.dp == dp]
            # On the host: what is shared comes from and goes to host memory.
            group = dist.new_group(
                [place.rank for place in members], backend="gloo", timeout=timedelta(seconds=timeout_s)
            )
            if dp == coordinates.dp:
                self._group = group
                self._size = len(members)
                self._leader = next(place.rank for place in members if place.is_leader)

    def agree(self, failure: DataPlaneError | None) -> None:
        """Every worker of the world calls it. Raises the failure, and on the workers that have none
        DataPlaneError, or DeadlineExceeded for one that came too late, when there is one anywhere."""
        severity = torch.tensor(0 if failure is None else 2 if isinstance(failure, Overdue) else 1)
        if self._coordinates.layout.world_size > 1:
            dist.all_reduce(severity, dist.ReduceOp.MAX, group=self._world)
        if failure is not None:
            raise failure
        if severity.item():
            kind = DeadlineExceeded if severity.item() == 2 else DataPlaneError
            raise kind("another policy worker could not fetch its samples")

    def share(
        self, columns: Sequence[Column], num_tokens: int, fetched: Mapping[str, np.ndarray] | None
    ) -> dict[str, np.ndarray]:
        """The leader's columns on every worker; only the leader gives ``fetched``.

        Columns are per token and packed, [num_tokens, *inner_shape]; they travel in one broadcast.
        """
        if self._size == 1:
            assert fetched is not None
            return dict(fetched)
        # Widest items first keeps every column aligned in the common buffer.
        ordered = sorted(columns, key=lambda column: -np.dtype(column.dtype).itemsize)
        sizes = [
            num_tokens * math.prod(column.inner_shape) * np.dtype(column.dtype).itemsize for column in ordered
        ]
        buffer = np.empty(sum(sizes), dtype=np.uint8)
        ends = np.cumsum(sizes)
        parts = {
            column.name: buffer[end - size : end]
            for column, size, end in zip(ordered, sizes, ends, strict=True)
        }
        if fetched is not None:
            for column in columns:
                values = np.ascontiguousarray(fetched[column.name], dtype=column.dtype)
                parts[column.name][:] = values.reshape(-1).view(np.uint8)
        dist.broadcast(torch.from_numpy(buffer), src=self._leader, group=self._group)
        return {
            column.name: parts[column.name].view(column.dtype).reshape(num_tokens, *column.inner_shape)
            for column in columns
        }
