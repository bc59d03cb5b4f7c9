"""The data plane of one process over TransferQueue: registry and storage as it reaches them."""

from __future__ import annotations

import concurrent.futures
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nemo_like.cluster.actors import Call
from nemo_like.data_plane.client import PackedDataPlane, Stored
from nemo_like.data_plane.deadline import Deadline
from nemo_like.data_plane.errors import DataPlaneError, DeadlineExceeded, StorageFailed
from nemo_like.data_plane.exchange import GaveUp
from nemo_like.data_plane.factory import DataPlaneSpec
from nemo_like.data_plane.observed import ObservedStore
from nemo_like.data_plane.operations import OperationLog
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Replacement,
    Rows,
    Segment,
    Thinned,
    Want,
)
from nemo_like.data_plane.transfer_queue import Connection, Session

_T = TypeVar("_T")

# How much later than the host's own deadline a client gives up, so that the host's better message wins.
_GRACE_S = 5.0
# How long after a request that failed to look for the death that may have caused it.
_CAUSE_GRACE_S = 2.0


class TransferQueueDataPlane(PackedDataPlane):
    """The data plane of one process."""

    def __init__(self, spec: DataPlaneSpec, log: OperationLog | None) -> None:
        """Connects, which waits for the storage to be up; raises StorageFailed when it can't be reached.
        What moves is counted in ``log``."""
        connection, failure = _connect(spec), spec.host.submit("storage_failure")
        remote = _Remote(connection, failure)
        self._session = remote.session
        super().__init__(
            remote,
            remote if log is None else ObservedStore(remote, log),
            client_id=connection.client_id,
            writer=f"process {os.getpid()} on {socket.gethostname()}",
            timeout_s=spec.timeout_s,
        )

    def close(self) -> None:
        """Disconnect this process; the storage lives on."""
        self._session.close()


class _Remote:
    """Catalog and store; a wait ends with the answer, the deadline, or the death of what it waits for."""

    def __init__(self, connection: Connection, failure: Call) -> None:
        self._failure: concurrent.futures.Future[str] = failure.ref.future()
        self.session = Session(connection, self._failure)
        self._own_indexes = _OwnIndexes()

    def describe(self, name: str, timeout_s: float) -> PartitionInfo:
        info, indexes = self._ask("describe", name, timeout_s, name)
        self._own_indexes.add(info, indexes)
        return cast("PartitionInfo", info)

    def find(self, name: str, wants: Sequence[Want], timeout_s: float) -> tuple[PartitionInfo, list[Segment]]:
        info, indexes, segments = self._ask("find", name, timeout_s + _GRACE_S, name, wants, timeout_s)
        self._own_indexes.add(info, indexes)
        return info, segments

    def reserve(self, info: PartitionInfo, sizes: Mapping[str, int], timeout_s: float) -> None:
        self._ask("reserve", info.name, timeout_s, info.name, info.storage_id, sizes)

    def release(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        self._ask("release", info.name, timeout_s, info.storage_id, keys)

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None:
        self._ask("commit", info.name, timeout_s, info.name, info.storage_id, commit)

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        segments: list[Segment] = self._ask(
            "locate", info.name, timeout_s + _GRACE_S, info.name, info.storage_id, wants, timeout_s
        )
        return segments

    def clear(self, info: PartitionInfo, rows: Rows, timeout_s: float) -> Sequence[Thinned]:
        thinned: Sequence[Thinned] = self._ask(
            "clear", info.name, timeout_s + _GRACE_S, info.name, info.storage_id, rows
        )
        return thinned

    def replace(
        self, info: PartitionInfo, replacements: Sequence[Replacement], timeout_s: float
    ) -> Sequence[Thinned]:
        thinned: Sequence[Thinned] = self._ask(
            "replace", info.name, timeout_s + _GRACE_S, info.name, info.storage_id, replacements
        )
        return thinned

    def save(
        self, info: PartitionInfo, keys: Sequence[str], values: Stored, timeout_s: float
    ) -> Sequence[object]:
        def register_and_save() -> Sequence[object]:
            deadline = Deadline(timeout_s)
            indexes = self._own_indexes.take(info.storage_id, len(keys))
            if not indexes:
                indexes = self.session.register(info.storage_id, keys, timeout_s)
            return self.session.save(info.storage_id, indexes, values, deadline.remaining())

        return self._finish(register_and_save, "put", info.name, timeout_s)

    def load(
        self, info: PartitionInfo, segments: Sequence[Segment], columns: Sequence[str], timeout_s: float
    ) -> Stored:
        addresses = [segment.address for segment in segments]
        return self._finish(
            lambda: self.session.load(addresses, columns, timeout_s), "get", info.name, timeout_s
        )

    def discard(self, info: PartitionInfo, segments: Sequence[Segment], timeout_s: float) -> None:
        def drop() -> None:
            dropping = self.session.start(self.session.drop(info.storage_id, segments))
            concurrent.futures.wait(
                [dropping, self._failure], timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
            )
            if not dropping.done():
                dropping.cancel()
                raise GaveUp
            dropping.result()

        self._finish(drop, "discard", info.name, timeout_s)

    def _ask(self, method: str, partition: str, timeout_s: float, *args: object) -> Any:
        """A request to the host."""
        return self._finish(
            lambda: self.session.ask(method, *args, timeout_s=timeout_s), method, partition, timeout_s
        )

    def _finish(self, work: Callable[[], _T], doing: str, partition: str, timeout_s: float) -> _T:
        try:
            return work()
        except DataPlaneError:
            raise
        except GaveUp:
            if self._failure.done():
                raise StorageFailed(f"partition {partition!r}: {self._cause()}, noticed in {doing}") from None
            raise DeadlineExceeded(
                f"partition {partition!r}: a {doing} did not finish in the {timeout_s:.1f} s that "
                "data_plane.timeout_s left for it, though the storage's processes live"
            ) from None
        except Exception as error:
            concurrent.futures.wait([self._failure], timeout=_CAUSE_GRACE_S)
            cause = self._cause() if self._failure.done() else f"{type(error).__name__}: {error}"
            raise StorageFailed(f"partition {partition!r}: {doing} failed: {cause}") from error

    def _cause(self) -> str:
        error = self._failure.exception()
        if error is None:
            return self._failure.result()
        return f"the data plane's host died ({type(error).__name__})"


class _OwnIndexes:
    """Indexes that the host had registered and gave to this process: it stores under them without asking.
    Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[str, list[int]] = {}  # by storage id

    def add(self, info: PartitionInfo, indexes: Sequence[int]) -> None:
        with self._lock:
            self._free = {key: free for key, free in self._free.items() if key in info.open_ids}
            self._free.setdefault(info.storage_id, []).extend(indexes)

    def take(self, storage_id: str, count: int) -> list[int]:
        """So many, or none."""
        with self._lock:
            free = self._free.get(storage_id, [])
            taken = free[:count] if len(free) >= count else []
            del free[: len(taken)]
        return taken


def _connect(spec: DataPlaneSpec) -> Connection:
    try:
        return spec.host.submit("connect").result(spec.start_timeout_s + _GRACE_S)
    except GetTimeoutError as error:
        raise StorageFailed(
            f"the data plane's host did not answer within {spec.start_timeout_s:g} s; its log is "
            f"{spec.host.log_path or 'not recorded'}"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, DataPlaneError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise StorageFailed(f"the data plane's host is gone ({type(error).__name__})") from error
