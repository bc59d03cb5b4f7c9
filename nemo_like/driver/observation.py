"""Writes traces and profiles of the steps that the configuration names, and measures the GPUs in every
step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.observability.disk import write_whole
from nemo_like.observability.metrics import merge
from nemo_like.observability.options import LoggerConfig
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.trace import chrome_trace, start_trace, take_trace

# Writing a profile of a large model's step takes minutes.
_TIMEOUT_S = 600.0
# Long enough: asking the GPUs' driver takes milliseconds.
_GPU_TIMEOUT_S = 30.0


class StepObservation:
    """The ``StepObserver`` of a run: it records all of the run's processes."""

    def __init__(
        self,
        cfg: LoggerConfig,
        cluster: Cluster,
        actors: Callable[[], Sequence[ActorHandle]],
        directory: RunDirectory,
        gpu_actors: Callable[[], Sequence[ActorHandle]],
    ) -> None:
        """Observe the processes that ``actors()`` returns at the time, since any may be replaced.

        A trace lists them in this order, below the driver. ``gpu_actors()`` returns processes with GPUs, such
        that each GPU is counted once.
        """
        self._cfg, self._cluster, self._actors, self._directory = cfg, cluster, actors, directory
        self._gpu_actors = gpu_actors

    def mark_ranges(self, actors: Sequence[ActorHandle]) -> None:
        """Have these processes name their work for Nsight Systems from now on, if logger.nvtx_ranges is set.

        All of them must be processes that load torch.
        """
        if self._cfg.nvtx_ranges:
            self._everywhere(actors, lambda actor: ("mark_ranges",))

    @contextmanager
    def observing(self, step: int) -> Iterator[None]:
        """Trace and profile the block, a step, if the configuration asks for it.

        A step that raises leaves no trace or profile.
        """
        is_traced, is_profiled = step in self._cfg.trace_steps, step in self._cfg.profile.steps
        if is_profiled:
            self._everywhere(self._profiled(), lambda actor: ("start_profile",))
        if is_traced:
            self._everywhere(self._actors(), lambda actor: ("start_trace",))
            start_trace()
        yield
        if is_traced:
            self._write_trace(step)
        if is_profiled:
            paths = {actor: str(self._directory.profile_path(step, actor.name)) for actor in self._profiled()}
            self._everywhere(list(paths), lambda actor: ("stop_profile", paths[actor]))

    def gpu_metrics(self) -> dict[str, float]:
        """Return how busy and full the GPUs of every kind of process were since the last call.

        Empty on CPUs, and when a process does not answer.
        """
        actors = self._gpu_actors()
        if not actors:
            return {}
        calls = [actor.observe("take_gpu_usage") for actor in actors]
        try:
            taken = self._cluster.gather(
                calls, stage="observation", timeout_s=_GPU_TIMEOUT_S, watching=actors
            )
        except ClusterError:
            return {}  # the step is complete without GPU metrics; the next one finds out who died
        parts = [
            {f"performance/gpu/{kind_of(actor.name)}/{name}": metric for name, metric in usage.items()}
            for actor, usage in zip(actors, taken, strict=True)
        ]
        return {name: metric.value for name, metric in merge(parts).items()}

    def _profiled(self) -> list[ActorHandle]:
        return [actor for actor in self._actors() if _matches(actor.name, self._cfg.profile.processes)]

    def _write_trace(self, step: int) -> None:
        processes = {"driver": take_trace()}
        actors = self._actors()
        spans = self._everywhere(actors, lambda actor: ("take_trace",))
        processes |= {actor.name: taken for actor, taken in zip(actors, spans, strict=True)}
        path = self._directory.trace_path(step)
        write_whole(path, json.dumps(chrome_trace(processes)).encode(), f"the trace of step {step}")

    def _everywhere(
        self, actors: Sequence[ActorHandle], command: Callable[[ActorHandle], tuple[str, ...]]
    ) -> list[Any]:
        calls = [actor.observe(*command(actor)) for actor in actors]
        return self._cluster.gather(calls, stage="observation", timeout_s=_TIMEOUT_S)


def kind_of(actor: str) -> str:
    """Return the kind of a process from its name: ``policy_worker`` for ``policy_worker-3``."""
    return actor.rpartition("-")[0] or actor


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
