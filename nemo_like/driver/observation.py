"""Traces and profiles of the steps for which the configuration asks; other steps cost nothing."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.schema import LoggerConfig
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.trace import chrome_trace, start_trace, take_trace

# Writing a profile of a large model's step takes minutes.
_TIMEOUT_S = 600.0


class StepObservation:
    """``StepObserver`` over the processes of a run."""

    def __init__(
        self,
        cfg: LoggerConfig,
        cluster: Cluster,
        actors: Callable[[], Sequence[ActorHandle]],
        directory: RunDirectory,
    ) -> None:
        """``actors()`` are those of the moment, in the order of a trace, below the driver."""
        self._cfg, self._cluster, self._actors, self._directory = cfg, cluster, actors, directory

    def mark_ranges(self, actors: Sequence[ActorHandle]) -> None:
        """From now on these processes, which load torch for CUDA, name what they do for Nsight Systems."""
        if self._cfg.nvtx_ranges:
            self._everywhere(actors, lambda actor: ("mark_ranges",))

    @contextmanager
    def observing(self, step: int) -> Iterator[None]:
        """Around a step. Nothing is written of a step that raises."""
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

    def _profiled(self) -> list[ActorHandle]:
        return [actor for actor in self._actors() if _matches(actor.name, self._cfg.profile.processes)]

    def _write_trace(self, step: int) -> None:
        processes = {"driver": take_trace()}
        actors = self._actors()
        spans = self._everywhere(actors, lambda actor: ("take_trace",))
        processes |= {actor.name: taken for actor, taken in zip(actors, spans, strict=True)}
        path = self._directory.trace_path(step)
        path.write_text(json.dumps(chrome_trace(processes)), encoding="utf-8")

    def _everywhere(
        self, actors: Sequence[ActorHandle], command: Callable[[ActorHandle], tuple[str, ...]]
    ) -> list[Any]:
        calls = [actor.observe(*command(actor)) for actor in actors]
        return self._cluster.gather(calls, stage="observation", timeout_s=_TIMEOUT_S)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)
