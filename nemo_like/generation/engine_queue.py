"""``EngineQueue``: the calls of an engine that have not reached vLLM yet, and the journal of those that have.

    submit ──▶ waiting ─┐                       ┌─▶ journal
    abort  ──▶ to abort ┼─ next, between steps ─┴─▶ vLLM
    pause  ──▶ pausing ─┘

Only the engine's step thread calls it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from nemo_like.generation.engine_journal import JournalError, JournalWriter
from nemo_like.generation.engine_order import (
    AbortRequests,
    Action,
    AddRequests,
    EngineSituation,
    Enqueued,
    JournalOrder,
    LiveOrder,
    WaitFor,
)

RequestT = TypeVar("RequestT", bound=Enqueued)


@dataclass(frozen=True, slots=True)
class _Pausing:
    version: int
    granted: Future[None]


@dataclass(frozen=True, slots=True)
class _Awaited:
    what: str
    deadline_s: float  # on the clock


@dataclass(slots=True)
class EngineQueue(Generic[RequestT]):
    """The requests, aborts and pauses that wait for one engine, and how many steps the engine has run.

    While ``journal`` has events, they decide what comes next; then ``live`` does. ``writer`` writes down what
    is done. A call that ``journal`` expects must come within ``timeout_s``.
    """

    live: LiveOrder
    timeout_s: float
    journal: JournalOrder | None = None
    writer: JournalWriter | None = None
    clock: Callable[[], float] = time.monotonic
    num_steps: int = 0
    waiting: dict[str, RequestT] = field(default_factory=dict)
    _to_abort: dict[str, None] = field(default_factory=dict)  # in the order of the aborts
    _pausing: _Pausing | None = None
    _awaited: _Awaited | None = None

    @property
    def is_draining(self) -> bool:
        """Whether a trainer waits for a pause. Until it is granted, samples end and no other begins."""
        return self._pausing is not None

    def next(self, running: Collection[str], num_sequences: int, *, is_paused: bool) -> Action:
        """Return what the engine does next, and write requests that enter or leave to the journal.

        Raises JournalError when a replay differs from its journal, or an expected call has not come in time.
        """
        now = EngineSituation(
            num_steps=self.num_steps,
            waiting=self.waiting,
            running=running,
            num_sequences=num_sequences,
            to_abort=self._to_abort,
            wants_pause_for=None if self._pausing is None else self._pausing.version,
            is_paused=is_paused,
        )
        action = None if self.journal is None else self.journal.next(now)
        if action is None:
            self.journal, action = None, self.live.next(now)
        self._check_patience(action if isinstance(action, WaitFor) else WaitFor())
        if isinstance(action, AddRequests):
            self._write_added(action.request_ids)
        elif isinstance(action, AbortRequests):
            self._forget(action.request_ids)
        return action

    @property
    def awaited(self) -> str:
        """The call that the replayed journal expects and that has not come; empty where it expects none."""
        return "" if self._awaited is None else self._awaited.what

    def patience_s(self) -> float | None:
        """Return how many seconds are left for the call that the latest ``next`` waits for; None: any
        number."""
        return None if self._awaited is None else max(0.0, self._awaited.deadline_s - self.clock())

    def take(self, request_id: str) -> RequestT:
        """Remove a waiting request from the queue and return it."""
        return self.waiting.pop(request_id)

    def abort(self, request_ids: Iterable[str], running: Collection[str]) -> tuple[str, ...]:
        """Forget waiting requests, and return the running requests that vLLM must abort now.

        While a journal is replayed, a request of that journal stays until the step at which it was aborted or
        finished in the recorded run.
        """
        now: list[str] = []
        for name in request_ids:
            if self.journal is not None and (name in running or self.journal.knows(name)):
                self._to_abort[name] = None
            elif name in running or name in self.waiting:
                now.append(name)
        self._forget(now)
        return tuple(name for name in now if name in running)

    def abort_all(self, running: Collection[str]) -> tuple[str, ...]:
        """Forget all waiting requests, and return the running requests, which vLLM must abort now.

        A replay ends here, since the calls to come are not those of the recorded run.
        """
        self.journal, self._awaited = None, None
        return self.abort([*self.waiting, *running], running)

    def is_wanted(self, finished_id: str) -> bool:
        """Return whether a finished request shall be delivered: whether no caller has aborted it."""
        wanted = finished_id not in self._to_abort
        self._to_abort.pop(finished_id, None)
        return wanted

    def ask_pause(self, version: int) -> Future[None]:
        """Ask for a pause, in place of an earlier one; the returned future resolves when it is granted."""
        self.give_up_pause(RuntimeError(f"another pause, for version {version}, took its place"))
        self._pausing = _Pausing(version, Future())
        return self._pausing.granted

    def grant_pause(self) -> int:
        """Tell the caller of ``ask_pause`` that the engine is paused now, and return the policy version whose
        weights are to be loaded."""
        assert self._pausing is not None
        pausing, self._pausing = self._pausing, None
        pausing.granted.set_result(None)
        return pausing.version

    def give_up_pause(self, reason: Exception) -> None:
        """Withdraw the pause that waits, if any; its future raises ``reason``."""
        if self._pausing is not None:
            self._pausing.granted.set_exception(reason)
            self._pausing = None

    def took_weights(self, version: int, running: Sequence[str]) -> None:
        """Write that the engine took new weights while these requests were running."""
        if self.journal is not None:
            self.journal.took(version)
        if self.writer is not None:
            self.writer.took_weights(self.num_steps, version, running)

    def write_finished(self, request_id: str, versions: Sequence[Sequence[tuple[int, int]]]) -> None:
        """Write the versions of a finished group's responses, where a response has several."""
        if self.writer is not None and any(len(spans) > 1 for spans in versions):
            self.writer.finished_mixed(self.num_steps, request_id, versions)

    def flush(self) -> None:
        """Bring the journal to its file. Raises DiskFull or OSError."""
        if self.writer is not None:
            self.writer.ran(self.num_steps)
            self.writer.flush()

    def fail(self, reason: Exception) -> list[RequestT]:
        """Forget everything, since the engine failed; return the requests that waited."""
        waiting = list(self.waiting.values())
        self.waiting.clear()
        self._to_abort.clear()
        self.give_up_pause(reason)
        return waiting

    def _forget(self, request_ids: Sequence[str]) -> None:
        """Forget requests that are aborted, and write it."""
        for name in request_ids:
            self._to_abort.pop(name, None)
            self.waiting.pop(name, None)
        if self.writer is not None and request_ids:
            self.writer.aborted(self.num_steps, request_ids)

    def _write_added(self, request_ids: Sequence[str]) -> None:
        if self.writer is not None:
            self.writer.added(self.num_steps, [(name, self.waiting[name].digest) for name in request_ids])

    def _check_patience(self, wait: WaitFor) -> None:
        if not wait.what:
            self._awaited = None
        elif self._awaited is None or self._awaited.what != wait.what:
            self._awaited = _Awaited(wait.what, self.clock() + self.timeout_s)
        elif self.clock() >= self._awaited.deadline_s:
            came = f"; {wait.came}" if wait.came else ""
            raise JournalError(f"waited {self.timeout_s:g} s for {wait.what}{came}")
