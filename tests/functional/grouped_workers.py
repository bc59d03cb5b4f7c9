"""A policy worker group whose every rank has the driver's side too, for worlds without Ray.

Each rank calls the group as the driver does. A call is made on the rank's own worker, and the answers of all
ranks are gathered; what leaders write to their own data plane is then written on the other ranks' too, as if
all had the same one.
"""

from __future__ import annotations

import pickle
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.interface import ColumnData
from nemo_like.policy.groups.group import PolicyWorkerGroup
from nemo_like.policy.options import PolicyConfig
from nemo_like.policy.workers.worker import PolicyWorker
from tests.functional.policy_fixtures import ready_worker


class SharedDataPlane(InMemoryDataPlane):
    """One rank's plane, which remembers what its worker wrote, and of each column how many samples it
    fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: Counter[str] = Counter()
        self._written: list[tuple[KVBatchMeta, Mapping[str, ColumnData]]] = []
        self._has_written = threading.Semaphore(0)

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        self.fetched.update({name: len(meta) for name in columns})
        return super().fetch(meta, columns)

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        written = super().write(meta, columns)
        self._written.append((meta, columns))
        self._has_written.release()
        return written

    def share_written(self, *, leads: bool) -> None:
        """Wait for this rank's write, if it leads, and have every rank's on all ranks."""
        if leads:
            assert self._has_written.acquire(timeout=30.0), "nothing was written"
        mine, self._written = self._written, []
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, mine)
        for rank, of_rank in enumerate(everywhere):
            if rank != dist.get_rank():
                for meta, columns in of_rank:
                    super().write(meta, columns)


class _Rank:
    """An actor's handle; a call on another rank's is made there."""

    def __init__(self, name: str, worker: PolicyWorker | None, plane: SharedDataPlane, leads: bool) -> None:
        self.name, self._worker, self._plane, self._leads = name, worker, plane, leads

    def submit(self, method: str, *args: Any) -> Callable[[], Any]:
        def call() -> Any:
            if self._worker is None:
                return None
            answer = getattr(self._worker, method)(*pickle.loads(pickle.dumps(args)))
            if method == "compute_logprobs":
                self._plane.share_written(leads=self._leads)
            return answer

        return call


class _Gathered:
    """A cluster whose calls run when their answers are gathered."""

    def gather(self, calls: Sequence[Callable[[], Any]], **_: Any) -> list[Any]:
        answers: list[Any] = [None] * len(calls)
        dist.all_gather_object(answers, [call() for call in calls][dist.get_rank()])
        return answers


def grouped_workers(
    coordinates: Coordinates,
    cfg: PolicyConfig,
    loss: LossConfig,
    plane: SharedDataPlane,
    *,
    temperature: float = 1.0,
    num_epochs: int = 1,
) -> tuple[PolicyWorkerGroup, PolicyWorker]:
    """The group as this rank calls it, and the rank's own worker; all ranks make the same calls."""
    worker = ready_worker(cfg, loss, coordinates, plane, temperature)
    layout = coordinates.layout
    ranks = [
        _Rank(
            f"policy_worker-{rank}",
            worker if rank == coordinates.rank else None,
            plane,
            layout.coordinates(rank).is_leader,
        )
        for rank in range(layout.world_size)
    ]
    group = PolicyWorkerGroup(ranks, _Gathered(), cfg, num_epochs=num_epochs, deadline_s=lambda stage: 60.0)
    return group, worker
