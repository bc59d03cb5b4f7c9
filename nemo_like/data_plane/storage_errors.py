"""What can go wrong in the data plane. Each message names partition, samples, column and who writes it.

Every error is built from one message, so that it survives the way back from another process.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.cluster.actor_errors import Overdue

_MAX_LISTED = 8


class DataPlaneError(RuntimeError):
    """Base of everything the data plane raises on purpose."""


class UnknownPartition(DataPlaneError):
    """No such partition is open: never registered, or closed already."""


class PartitionExists(DataPlaneError):
    """A partition of this name is open already."""


class TooManyPartitions(DataPlaneError):
    """As many partitions as there may be stayed open until the deadline: consumers are behind."""


class UnknownColumn(DataPlaneError):
    """The column was not declared when the partition was opened."""


class UnknownSamples(DataPlaneError):
    """Samples that were never put, or cleared since."""


class ColumnMismatch(DataPlaneError):
    """Values that differ from the column's declaration; nothing is ever cast."""


class DuplicateWrite(DataPlaneError):
    """A (sample, column) has one writer, once."""


class MissingData(DataPlaneError, Overdue):
    """A declared column was not written within the deadline."""


class CorruptData(DataPlaneError):
    """The storage returned something else than what was written."""


class CapacityExceeded(DataPlaneError):
    """The storage holds as much as it may; nothing of the write was kept."""


class StorageFailed(DataPlaneError):
    """A process behind the data plane is gone or refused."""


class DeadlineExceeded(DataPlaneError, Overdue):
    """The storage did not answer in time, though its processes live."""


def listed(items: Sequence[object]) -> str:
    """The first few items and how many there are, for a message."""
    shown = ", ".join(str(item) for item in items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown}, … ({len(items)} in all)"
