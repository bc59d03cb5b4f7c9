"""The errors of the data plane; a message names the partition, samples, column and writer it is about.

Every error takes one message, its text, so that it can be pickled and raised again in another process.
"""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.cluster.actor_errors import Overdue

_MAX_LISTED = 8
# How much later than the host's own deadline a caller gives up, so that the host's better message wins.
HOST_GRACE_S = 5.0


class DataPlaneError(RuntimeError):
    """The base class of the errors that the data plane raises on purpose."""


class UnknownPartition(DataPlaneError):
    """No such partition is open: it never was, or it has been closed."""


class PartitionExists(DataPlaneError):
    """A partition of this name is open already."""


class TooManyPartitions(DataPlaneError):
    """``max_open_partitions`` stayed open until the deadline: their consumers are behind."""


class UnknownColumn(DataPlaneError):
    """The column was not declared when the partition was opened."""


class UnknownSamples(DataPlaneError):
    """The wanted samples were never put, or have been cleared."""


class ColumnMismatch(DataPlaneError):
    """Values differ from the column's declaration, and nothing is ever cast."""


class DuplicateWrite(DataPlaneError):
    """A (sample, column) was written a second time; each is written once, by one writer."""


class MissingData(DataPlaneError, Overdue):
    """A declared column was not written within the deadline."""


class CorruptData(DataPlaneError):
    """The storage returned other values than were written, or values of another shape or dtype."""


class CapacityExceeded(DataPlaneError):
    """The storage has no room for a write, and kept nothing of it."""


class StorageFailed(DataPlaneError):
    """A process behind the data plane died, could not start, could not be reached or failed a call."""


class DeadlineExceeded(DataPlaneError, Overdue):
    """The storage did not answer in time, though its processes live."""


def listed(items: Sequence[object]) -> str:
    """Return the first few items for a message, and where there are more, how many in all."""
    shown = ", ".join(str(item) for item in items[:_MAX_LISTED])
    return shown if len(items) <= _MAX_LISTED else f"{shown}, … ({len(items)} in all)"
