"""Decides what an engine does next. Pure: nothing here waits or calls vLLM.

    requests that wait ─┐
    requests that run  ─┼─▶ next: add | abort | pause | step | wait
    a wish to pause    ─┘

``LiveOrder`` decides by the requests at hand. ``JournalOrder`` replays a journal: as long as the journal has
events, each takes effect at the step at which it did then, in the same order, whenever its caller comes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.generation.engine_journal import (
    JournalError,
    JournalEvent,
    RequestsAborted,
    RequestsAdded,
    StepsRan,
    WeightsTaken,
    WrittenJournal,
)


class Enqueued(Protocol):
    """A request that vLLM does not have yet."""

    @property
    def num_responses(self) -> int: ...

    @property
    def digest(self) -> int:
        """A digest of everything on which its responses depend besides the weights."""


@dataclass(frozen=True, slots=True)
class EngineSituation:
    """The state of an engine between two of its steps."""

    num_steps: int  # steps that have run
    waiting: Mapping[str, Enqueued]  # in the order in which they came
    running: Collection[str]  # requests that vLLM has
    num_sequences: int  # unfinished responses of the running requests
    to_abort: Collection[str]  # waiting or running requests that their callers have aborted
    wants_pause_for: int | None  # the version that a trainer wants to bring; None: no trainer waits
    is_paused: bool


@dataclass(frozen=True, slots=True)
class AddRequests:
    """Give these requests to vLLM, in this order."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AbortRequests:
    """Remove these requests from vLLM, or from the waiting requests."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class GrantPause:
    """Run no step until the trainer has brought its weights, or has given the transfer up."""


@dataclass(frozen=True, slots=True)
class RunStep:
    """Have vLLM compute one step."""


@dataclass(frozen=True, slots=True)
class WaitFor:
    """Wait for the next call from another process. In a replay, ``what`` names the call that the replayed
    journal has next, and the wait has a deadline; otherwise ``what`` is "" and the wait has none."""

    what: str = ""
    came: str = ""  # which requests came instead


Action = AddRequests | AbortRequests | GrantPause | RunStep | WaitFor


class LiveOrder:
    """Gives requests to vLLM as there is room, and grants a pause as soon as no sample must end first.

    Requests wait outside of vLLM until there is room for them, since vLLM begins whatever it has, and no
    sample may begin while a trainer that brings weights between samples waits for the running ones.
    """

    def __init__(self, weight_updates: WeightUpdates | None, max_num_seqs: int) -> None:
        """Order an engine that samples at most ``max_num_seqs`` responses at once."""
        self._is_in_flight = weight_updates is WeightUpdates.in_flight
        self._max_num_seqs = max_num_seqs

    def next(self, now: EngineSituation) -> Action:
        if now.to_abort:
            return AbortRequests(tuple(now.to_abort))
        if now.is_paused:
            return WaitFor()
        if now.wants_pause_for is not None:
            return GrantPause() if self._is_in_flight or not now.running else RunStep()
        if fitting := self._fitting(now):
            return AddRequests(fitting)
        return RunStep() if now.running else WaitFor()

    def _fitting(self, now: EngineSituation) -> tuple[str, ...]:
        """Return the first waiting requests for whose responses there is room; at least one request where
        nothing runs."""
        fitting: list[str] = []
        num_sequences = now.num_sequences
        for name, request in now.waiting.items():
            if num_sequences and num_sequences + request.num_responses > self._max_num_seqs:
                break
            fitting.append(name)
            num_sequences += request.num_responses
        return tuple(fitting)


class JournalOrder:
    """Replays the events of a journal. ``took`` tells it that the engine took new weights."""

    def __init__(self, journal: WrittenJournal) -> None:
        self._path = journal.path
        self._events: deque[JournalEvent] = deque(journal.events)
        # Requests whose entry, or whose abort while they waited, is still to come.
        self._to_come = {name for event in journal.events for name in _names(event)}

    def knows(self, request_id: str) -> bool:
        """Return whether this request has not entered yet and occurs in the rest of the journal."""
        return request_id in self._to_come

    def next(self, now: EngineSituation) -> Action | None:
        """Return what the engine did next; None when every event has taken effect.

        Raises JournalError when the next event cannot take effect any more.
        """
        while self._events:
            event = self._events[0]
            if not isinstance(event, StepsRan) or event.step > now.num_steps:
                return self._next(event, now)
            self._events.popleft()
        return None

    def took(self, version: int) -> None:
        """Drop the event of new weights, for which ``next`` has granted a pause, and go on."""
        event = self._events.popleft()
        assert isinstance(event, WeightsTaken)
        assert event.version == version

    def _next(self, event: JournalEvent, now: EngineSituation) -> Action:
        if now.is_paused:
            return WaitFor()
        if event.step > now.num_steps:
            if not now.running:
                raise self._misfit(
                    event, f"of step {event.step}", f"the engine has nothing to decode after {now.num_steps}"
                )
            return RunStep()
        match event:
            case RequestsAdded():
                return self._add(event, now)
            case RequestsAborted():
                return self._abort(event, now)
            case WeightsTaken():
                return self._pause(event, now)
            case StepsRan():
                raise AssertionError("its step has come")

    def _add(self, event: RequestsAdded, now: EngineSituation) -> Action:
        for name, digest in event.requests:
            request = now.waiting.get(name)
            if request is None:
                others = [one for one in now.waiting if not self.knows(one)]
                came = f"{len(others)} others came, such as {others[0]!r}" if others else ""
                return WaitFor(
                    f"request {name!r}, which entered after step {event.step} by {self._at(event)}", came
                )
            if request.digest != digest:
                raise self._misfit(
                    event, f"request {name!r}", "it came with another prompt, seed or sampling settings"
                )
        self._events.popleft()
        names = tuple(name for name, _ in event.requests)
        self._to_come.difference_update(names)
        return AddRequests(names)

    def _abort(self, event: RequestsAborted, now: EngineSituation) -> Action:
        for name in event.request_ids:
            at = f"which was aborted after step {event.step} by {self._at(event)}"
            if name not in now.running and name not in now.waiting:
                if name in self._to_come:
                    return WaitFor(f"request {name!r}, {at}")
                raise self._misfit(event, f"the abort of request {name!r}", "it has finished")
            if name not in now.to_abort:
                return WaitFor(f"the abort of request {name!r}, {at}")
        self._events.popleft()
        self._to_come.difference_update(event.request_ids)
        return AbortRequests(event.request_ids)

    def _pause(self, event: WeightsTaken, now: EngineSituation) -> Action:
        if now.wants_pause_for is None:
            return WaitFor(
                f"policy version {event.version}, which came after step {event.step} by {self._at(event)}"
            )
        if now.wants_pause_for != event.version:
            raise self._misfit(
                event, f"policy version {event.version}", f"the trainer brings {now.wants_pause_for}"
            )
        return GrantPause()

    def _at(self, event: JournalEvent) -> str:
        return f"{self._path}:{event.line}"

    def _misfit(self, event: JournalEvent, expected: str, found: str) -> JournalError:
        return JournalError(
            f"{self._path}:{event.line}: expected is {expected}, and {found}; replay the run that wrote it, "
            "with the same configuration and data, or start without it"
        )


def _names(event: JournalEvent) -> Iterable[str]:
    match event:
        case RequestsAdded():
            return (name for name, _ in event.requests)
        case RequestsAborted():
            return event.request_ids
        case WeightsTaken() | StepsRan():
            return ()
