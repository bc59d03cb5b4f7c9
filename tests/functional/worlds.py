"""Processes that form one world of ranks after the other."""

from __future__ import annotations

import atexit
import datetime
import functools
import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.policy.options import BACKEND_KINDS, Device

_WARM = "tests.functional.warm_ranks"
_COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=60)


class WorldPool:
    """Processes that form one world after the other, since starting them costs more than a tiny world.

    No process outlives the ``with`` block. On a GPU each imports for itself: a process whose parent has asked
    for GPUs, as some imports do, cannot use them once it is forked.
    """

    def __init__(self, device: Device = Device.cpu) -> None:
        self._device = device
        self._context: Any = multiprocessing.get_context("forkserver" if device is Device.cpu else "spawn")
        if device is Device.cpu:
            backends = [f"nemo_like.policy.{backend}.backend" for backend in BACKEND_KINDS.names()]
            self._context.set_forkserver_preload(
                [*backends, "tests.functional.policy_fixtures", __name__, _WARM]
            )
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    def __enter__(self) -> WorldPool:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        layout: ParallelLayout,
        *args: Any,
        timeout_s: float = 100.0,
    ) -> list[Any]:
        """``function(coordinates, *args)`` on every rank with torch.distributed ready; results by rank.

        Raises AssertionError with the first rank's traceback that failed, or the ranks that were not done
        in time; the next world then has new processes.
        """
        while len(self._processes) < layout.world_size:
            self._start()
        connections = self._connections[: layout.world_size]
        # The ranks meet at a file: a free port may be another's by the time they use it.
        with tempfile.TemporaryDirectory() as place:
            for rank, connection in enumerate(connections):
                connection.send((function, layout.coordinates(rank), self._device, f"{place}/store", args))
            try:
                return _collect(connections, timeout_s)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """End all processes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._connections = [], []

    def _start(self) -> None:
        ours, theirs = self._context.Pipe()
        process = self._context.Process(target=_rank_main, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)


def run_world(
    function: Callable[..., Any],
    layout: ParallelLayout,
    *args: Any,
    device: Device = Device.cpu,
    timeout_s: float = 100.0,
) -> list[Any]:
    """One world in processes of its own, as ``WorldPool.run``; on a GPU in those of the world before it,
    since their imports take longer than everything else."""
    if device is Device.cuda:
        return _pool_on_gpus().run(function, layout, *args, timeout_s=timeout_s)
    with WorldPool() as pool:
        return pool.run(function, layout, *args, timeout_s=timeout_s)


@functools.cache
def _pool_on_gpus() -> WorldPool:
    pool = WorldPool(Device.cuda)
    atexit.register(pool.close)
    return pool


def _collect(connections: list[Connection], timeout_s: float) -> list[Any]:
    deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        pending = [connection for rank, connection in enumerate(connections) if rank not in results]
        ready = wait(pending, timeout=max(0.0, (deadline - datetime.datetime.now()).total_seconds()))
        assert ready, f"ranks {sorted(set(range(len(connections))) - set(results))} not done in {timeout_s} s"
        for connection in ready:
            rank = connections.index(connection)
            try:
                failure, results[rank] = pickle.loads(connection.recv_bytes())
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            assert failure is None, f"rank {rank} failed:\n{failure}"
    return [results[rank] for rank in range(len(connections))]


def _rank_main(connection: Connection) -> None:
    """Takes part in one world after the other, until the connection closes or a world fails."""
    torch.set_num_threads(1)
    while True:
        try:
            function, coordinates, device, store, args = connection.recv()
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo" if device is Device.cpu else "nccl",
                init_method=f"file://{store}",
                rank=coordinates.rank,
                world_size=coordinates.layout.world_size,
                timeout=_COLLECTIVE_TIMEOUT,
            )
            result = function(coordinates, *args)
            dist.barrier()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
            # Else the next world would reduce over groups of this one, whose ranks may be the same.
            _clear_sharding_prop_cache()
            # As bytes: tensors would travel as shared memory, which goes with the process that made it.
            connection.send_bytes(pickle.dumps((None, result)))
        except BaseException:
            connection.send_bytes(pickle.dumps((traceback.format_exc(), None)))
            raise
