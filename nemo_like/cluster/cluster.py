"""``Cluster``: the actors of one run, which it starts, watches and ends together."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_like.cluster.actor_errors import (
    ActorBroken,
    ActorDied,
    ActorFailed,
    ClusterError,
    Overdue,
    RayDied,
    StageTimeout,
)
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Call, start_actor
from nemo_like.cluster.breakdown import CODE_ERRORS, OUT_OF_MEMORY, Breakdown
from nemo_like.cluster.placement import Bundle, Reservation, reserve
from nemo_like.cluster.watchdog import Watchdog, end_processes

# When a call fails, or a process breaks down, another actor's death may have caused it. The wait for that
# death is this long, since a dying process closes its connections at once but takes seconds to be gone. No
# death causes an error of code that was given something wrong (``CODE_ERRORS``).
_CAUSE_GRACE_S = 10.0
# How often a waiting ``gather`` checks whether Ray itself still lives.
_RAY_PERIOD_S = 1.0
# When an actor has died: how long to wait for the deaths of the others on its node.
_NODE_GRACE_S = 5.0


# Called during a wait with the names of the actors whose calls have not ended, and how many seconds it lasts.
OnWait = Callable[[Sequence[str], float], None]


class Cluster:
    """Starts actors and waits for their calls; a wait fails at once when any actor dies.

    ``gather`` watches every actor, not just those whose calls it waits for, so that a death is reported
    within moments whatever stage is running. A caller can limit it to the actors that matter.
    """

    def __init__(
        self,
        report_directory: Path | None = None,
        ray_failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        """Prepare a cluster without actors.

        When a deadline is missed, the stacks of all actors are written to ``report_directory``; None: never.
        ``ray_failure`` returns why Ray itself is no longer usable, or None while it works.
        """
        self._ray_failure = ray_failure
        self._watchdog = Watchdog(report_directory) if report_directory else None
        self._has_hung = False
        self._handles: list[ActorHandle] = []
        self._watches: dict[ray.ObjectRef, ActorHandle] = {}
        self._reservation: Reservation | None = None
        self._num_starts: Counter[str] = Counter()

    def reserve(self, bundles: Sequence[Bundle], *, timeout_s: float) -> None:
        """Reserve the bundles until ``stop``.

        Each actor that a bundle names will start in that bundle, with its GPUs.
        Raises ClusterError when a bundle fits on no node, or when the bundles are not free in time.
        """
        self._reservation = reserve(bundles, timeout_s=timeout_s)

    def smallest_gpu_bytes(self) -> int | None:
        """Return the memory of the smallest reserved GPU; None without GPUs, or where any size is unknown."""
        nodes = self._reservation.nodes.values() if self._reservation else ()
        sizes = [gpu.num_bytes for node in nodes for gpu in node.gpus]
        known = [size for size in sizes if size is not None]
        return min(known) if known and len(known) == len(sizes) else None

    def smallest_host_bytes(self) -> int | None:
        """Return the memory of the smallest reserved node with GPUs; None without GPUs."""
        nodes = self._reservation.nodes.values() if self._reservation else ()
        return min((node.memory_bytes for node in nodes if node.memory_bytes is not None), default=None)

    def endpoint(self, actor: str, *, timeout_s: float) -> tuple[str, int]:
        """Return the address of the node on which ``actor`` will start, and a TCP port that is free there.

        Raises ValueError when nothing is reserved.
        """
        if self._reservation is None:
            raise ValueError(f"no resources are reserved for actor {actor!r}")
        return self._reservation.endpoint(actor, timeout_s)

    def start(self, spec: ActorSpec, **options: Any) -> ActorHandle:
        """Start one process, watch it, and return at once. A discarded actor's name may be used again."""
        options_of_bundle: dict[str, Any] = {}
        if self._reservation:
            options_of_bundle = self._reservation.options(spec.name)
            spec = replace(spec, env={**spec.env, **self._reservation.environment(spec.name)})
        if self._num_starts[spec.name]:
            # Ray frees a dead actor's name only after some moments.
            options_of_bundle["name"] = f"{spec.name}-{self._num_starts[spec.name]}"
        self._num_starts[spec.name] += 1
        handle = start_actor(spec, **{**options_of_bundle, **options})
        self._handles.append(handle)
        self.watch(handle, handle.watch())
        return handle

    def watch(self, handle: ActorHandle, call: Call) -> None:
        """Take the end of ``call``, a call of this actor, for the actor's failure from now on.

        Every ``gather`` then raises: ActorFailed with the call's error, ActorDied with the text that the call
        returned, or ActorBroken where it returned a ``Breakdown``.
        """
        self._watches[call.ref] = handle

    def dead(self) -> list[str]:
        """Return the names of the actors that are gone or no longer usable, since a watched call has
        ended."""
        ended, _ = ray.wait(list(self._watches), num_returns=len(self._watches), timeout=0)
        return list(dict.fromkeys(self._watches[ref].name for ref in ended))

    def discard(self, handle: ActorHandle) -> None:
        """Kill this actor if it lives, and watch it no longer: its death fails no wait."""
        self._watches = {ref: one for ref, one in self._watches.items() if one.name != handle.name}
        self._handles = [one for one in self._handles if one.name != handle.name]
        handle.kill()

    def gather(
        self,
        calls: Sequence[Call],
        *,
        stage: str,
        timeout_s: float,
        watching: Sequence[ActorHandle] | None = None,
        on_wait: OnWait | None = None,
    ) -> list[Any]:
        """Wait until all calls have ended and return their results in order.

        Raises ActorDied when any actor of the run dies or breaks down meanwhile (with ``watching``, only
        these actors count until a call has failed), RayDied when Ray itself dies, ActorFailed when a call
        or an actor's constructor raises, and StageTimeout when ``timeout_s`` passes or when a call raises
        because a deadline inside its actor has passed. Time for which this process itself is stopped, as by
        Ctrl-Z, does not count. Meanwhile ``on_wait`` is called, about once a second.
        """
        watches = list(self._watches)
        if watching is not None:
            names = {handle.name for handle in watching}
            watches = [ref for ref, handle in self._watches.items() if handle.name in names]
        try:
            return self._gather(calls, watches, stage=stage, timeout_s=timeout_s, on_wait=on_wait)
        except RayDied:
            raise
        except ClusterError as error:
            if (reason := self._ray_failure()) is not None:
                raise RayDied(reason, stage) from error
            error.lost_nodes = self._lost_nodes()
            if isinstance(error, StageTimeout):
                self._has_hung = True
                if self._watchdog:
                    error.stacks = self._watchdog.report(stage, self._log_paths(), error.waiting_for)
            raise

    def _gather(
        self,
        calls: Sequence[Call],
        watches: Sequence[ray.ObjectRef],
        *,
        stage: str,
        timeout_s: float,
        on_wait: OnWait | None,
    ) -> list[Any]:
        left_s = timeout_s
        pending = {call.ref: call for call in calls}
        results: dict[ray.ObjectRef, Any] = {}
        while pending:
            asked_s, began_s = min(left_s, _RAY_PERIOD_S), time.monotonic()
            ready, _ = ray.wait([*pending, *watches], num_returns=1, timeout=asked_s)
            passed_s = time.monotonic() - began_s
            # A wait that is much too long means that this process was stopped. Then it has yet to
            # hear which calls ended meanwhile, so the time does not count.
            if passed_s < asked_s + _RAY_PERIOD_S:
                left_s = max(0.0, left_s - passed_s)
            if not ready:
                if (reason := self._ray_failure()) is not None:
                    raise RayDied(reason, stage)
                if not left_s:
                    raise StageTimeout.of_stage(stage, timeout_s, sorted(_actors(pending)))
                if on_wait is not None:
                    on_wait(_actors(pending), timeout_s - left_s)
                continue
            if ready[0] in self._watches:
                raise self._death(ready[0], stage)
            # ray.wait looks at every pending call, so one wait per ended call would take quadratic time: all
            # that have ended by now are taken together.
            ended, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0)
            for ref in ended:
                results[ref] = self._result(pending.pop(ref), stage)
        return [results[call.ref] for call in calls]

    def stop(self) -> None:
        """Kill every actor of the run and release the reserved resources. Safe to call twice."""
        self._watches.clear()
        hung = self._log_paths() if self._has_hung else {}
        while self._handles:
            self._handles.pop().kill()
        if hung and self._ray_failure() is None:
            end_processes(hung)
        if self._reservation:
            self._reservation.release()
            self._reservation = None

    def _result(self, call: Call, stage: str) -> Any:
        try:
            return ray.get(call.ref, timeout=0)
        except (RayActorError, RayTaskError) as error:
            cause = error.cause if isinstance(error, RayTaskError) else error
            grace_s = 0.0 if isinstance(cause, CODE_ERRORS) else _CAUSE_GRACE_S
            ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=grace_s)
            if ready:
                raise self._death(ready[0], stage) from error
            if isinstance(cause, Overdue | TimeoutError):
                raise StageTimeout.of_call(f"{call.actor}.{call.method}", stage, cause) from error
            raise ActorFailed(
                call.actor, call.method, stage, cause or error, self._log_paths().get(call.actor)
            ) from error

    def _death(self, watch: ray.ObjectRef, stage: str) -> Exception:
        """Return the error for a watched call that has ended. Where its process broke down and another
        process dies within moments, that death was the cause: return the error for it instead."""
        first = error = self._ended(watch, stage)
        watches = list(self._watches)
        deadline = time.monotonic() + _CAUSE_GRACE_S
        while isinstance(error, ActorBroken) and error.kind not in OUT_OF_MEMORY:
            watches.remove(watch)
            left_s = max(0.0, deadline - time.monotonic())
            ready, _ = ray.wait(watches, num_returns=1, timeout=left_s) if watches else ([], [])
            if not ready:
                return first
            watch = ready[0]
            error = self._ended(watch, stage)
        return error

    def _ended(self, watch: ray.ObjectRef, stage: str) -> Exception:
        """Return the error for a watched call that has ended.

        The process is gone, its target could not be built, or the call returned the reason itself.
        """
        handle = self._watches[watch]
        try:
            reason = ray.get(watch, timeout=0)
            if isinstance(reason, Breakdown):
                return ActorBroken(handle.name, stage, handle.log_path, reason.reason, reason.kind)
            return ActorDied(handle.name, stage, handle.log_path, reason)
        except RayTaskError as error:
            return ActorFailed(handle.name, "__init__", stage, error.cause or error, handle.log_path)
        except RayActorError:
            return ActorDied(handle.name, stage, handle.log_path)

    def _lost_nodes(self) -> list[str]:
        """Return the addresses of the nodes whose actors are all gone; none for a run on one node."""
        node_of = self._reservation.nodes if self._reservation else {}
        if len(set(node_of.values())) < 2:
            return []
        watches = {ref: node_of[actor.name] for ref, actor in self._watches.items() if actor.name in node_of}
        # The actors are asked, since Ray takes a quarter of a minute to declare a node dead.
        ended, _ = ray.wait(list(watches), num_returns=len(watches), timeout=_NODE_GRACE_S)
        gone = {ref for ref in ended if not isinstance(self._ended(ref, ""), ActorBroken)}
        alive = {node for ref, node in watches.items() if ref not in gone}
        return [node.address for node in dict.fromkeys(watches.values()) if node not in alive]

    def _log_paths(self) -> dict[str, str]:
        """Return the log's path by actor name, for the actors that have a log of their own."""
        return {handle.name: handle.log_path for handle in self._handles if handle.log_path}


def _actors(pending: Mapping[ray.ObjectRef, Call]) -> list[str]:
    """Return the names of the actors of these calls, each once, in the order of the calls."""
    return list(dict.fromkeys(call.actor for call in pending.values()))
