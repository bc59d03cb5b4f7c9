"""How a process reaches the data plane's host and builds its client."""

from __future__ import annotations

import os
import socket
from functools import partial
from typing import Any

from ray.exceptions import RayActorError, RayTaskError

from nemo_like.config.import_path import load_by_path
from nemo_like.data_plane.client import DataPlaneClient, Store
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.observed import ObservedDataPlane, ObservedStore
from nemo_like.data_plane.operations import OperationLog
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.data_plane.storage_errors import HOST_GRACE_S, DataPlaneError, DeadlineExceeded, StorageFailed
from nemo_like.data_plane.storage_kind import storage_kind_of


class ActorHost:
    """A ``client.Host`` that calls the host's actor."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        self._handle = spec.host

    def ask(self, method: str, partition: str, timeout_s: float, *args: Any) -> Any:
        try:
            return self._handle.submit(method, *args).result(timeout_s + HOST_GRACE_S)
        except TimeoutError:
            raise DeadlineExceeded(
                f"partition {partition!r}: the data plane's host did not answer {method} in the "
                f"{timeout_s:.1f} s that data_plane.timeout_s left for it; its log is "
                f"{self._handle.log_path or 'not recorded'}"
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, DataPlaneError | ValueError):
                raise error.cause from None
            raise StorageFailed(
                f"partition {partition!r}: {method} failed: {error.cause or error}"
            ) from error
        except RayActorError as error:
            raise StorageFailed(
                f"partition {partition!r}: the data plane's host died ({type(error).__name__}), noticed in "
                f"{method}"
            ) from error


def connect(spec: DataPlaneSpec) -> DataPlane:
    """Wait until the storage is up, and return the data plane of this process.

    Raises StorageFailed when the storage can't be reached.
    """
    if not spec.is_observed:
        return _connected_client(spec, None)
    log = OperationLog()
    return ObservedDataPlane(_connected_client(spec, log), log)


def reconnect(plane: DataPlane, spec: DataPlaneSpec) -> DataPlane:
    """Disconnect this process from ``plane``, and return a client of the data plane that ``spec``
    describes."""
    plane.close()
    return connect(spec)


def _connected_client(spec: DataPlaneSpec, log: OperationLog | None) -> DataPlaneClient:
    """Return this process's client; where ``log`` is given, it counts the bytes that the client moves."""
    host = ActorHost(spec)
    client_id, addresses = host.ask("connect", "", spec.start_timeout_s)
    make_store, asked = load_by_path(storage_kind_of(spec.backend).store), spec.host
    store: Store = make_store(host, client_id, addresses, partial(asked.submit, "storage_failure"))
    return DataPlaneClient(
        host,
        store if log is None else ObservedStore(store, log),
        client_id=client_id,
        writer=f"process {os.getpid()} on {socket.gethostname()}",
        timeout_s=spec.timeout_s,
    )
