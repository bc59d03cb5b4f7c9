"""What an engine does next, with an engine of a few lines in the place of vLLM."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.generation.engine_journal import (
    JournalError,
    JournalEvent,
    JournalWriter,
    RequestsAborted,
    RequestsAdded,
    StepsRan,
    WeightsTaken,
    WrittenJournal,
    read_journal,
)
from nemo_like.generation.engine_order import (
    AbortRequests,
    Action,
    AddRequests,
    GrantPause,
    JournalOrder,
    LiveOrder,
    RunStep,
    WaitFor,
)
from nemo_like.generation.engine_queue import EngineQueue

BETWEEN, IN_FLIGHT = WeightUpdates.between_samples, WeightUpdates.in_flight
MAX_NUM_SEQS = 4


@dataclasses.dataclass(frozen=True)
class Asked:
    """A request for ``num_responses``, each of ``num_tokens`` tokens."""

    num_responses: int = 1
    num_tokens: int = 3
    digest: int = 0


def queue(updates: WeightUpdates | None = BETWEEN, **options: Any) -> EngineQueue[Asked]:
    return EngineQueue(LiveOrder(updates, MAX_NUM_SEQS), 10.0, **options)


def replaying(*events: JournalEvent, **options: Any) -> EngineQueue[Asked]:
    journal = JournalOrder(WrittenJournal(Path("journal/engine-0.jsonl"), {}, events))
    return queue(journal=journal, **options)


def next_of(
    of: EngineQueue[Asked], running: Mapping[str, int] | None = None, *, is_paused: bool = False
) -> Action:
    """What comes next while these requests run, each with so many responses."""
    running = running or {}
    return of.next(running.keys(), sum(running.values()), is_paused=is_paused)


def test_requests_enter_in_their_order_as_far_as_there_is_room() -> None:
    one = queue()
    one.waiting.update({"a": Asked(2), "b": Asked(2), "c": Asked(1)})
    assert next_of(one) == AddRequests(("a", "b"))
    assert next_of(one, {"x": 2}) == AddRequests(("a",))
    assert next_of(one, {"x": 3}) == RunStep()  # nothing overtakes a group that does not fit


def test_a_group_that_never_fits_enters_alone() -> None:
    one = queue()
    one.waiting.update({"large": Asked(9), "b": Asked(1)})
    assert next_of(one, {"x": 1}) == RunStep()
    assert next_of(one) == AddRequests(("large",))


def test_between_samples_a_pause_lets_what_runs_end_and_nothing_begin() -> None:
    one = queue(BETWEEN)
    one.waiting["waiting"] = Asked()
    granted = one.ask_pause(3)
    assert next_of(one, {"running": 1}) == RunStep()
    assert one.is_draining
    assert next_of(one) == GrantPause()
    assert not granted.done()
    assert one.grant_pause() == 3
    assert granted.done()
    assert next_of(one, is_paused=True) == WaitFor()
    assert next_of(one) == AddRequests(("waiting",))


def test_in_flight_a_pause_is_granted_at_once() -> None:
    one = queue(IN_FLIGHT)
    one.ask_pause(3)
    assert next_of(one, {"running": 1}) == GrantPause()


def test_a_second_pause_takes_the_place_of_the_first() -> None:
    one = queue()
    first, second = one.ask_pause(3), one.ask_pause(4)
    with pytest.raises(RuntimeError, match="another pause, for version 4, took its place"):
        first.result(0)
    assert one.grant_pause() == 4
    assert second.result(0) is None


def test_an_aborted_request_leaves_wherever_it_is() -> None:
    one = queue()
    one.waiting["waiting"] = Asked()
    assert one.abort(["waiting", "running", "unknown"], {"running"}) == ("running",)
    assert not one.waiting


def test_a_replay_waits_for_the_request_of_an_event_and_for_its_step() -> None:
    one = replaying(RequestsAdded(0, (("a", 0),), 2), RequestsAdded(2, (("b", 0), ("c", 0)), 3))
    one.waiting["c"] = Asked()
    assert next_of(one) == WaitFor("request 'a', which entered after step 0 by journal/engine-0.jsonl:2")
    one.waiting["a"] = Asked()
    assert next_of(one) == AddRequests(("a",))
    one.take("a")
    for _ in range(2):
        assert next_of(one, {"a": 1}) == RunStep()
        one.num_steps += 1
    assert isinstance(next_of(one, {"a": 1}), WaitFor)
    one.waiting["b"] = Asked()
    assert next_of(one, {"a": 1}) == AddRequests(("b", "c"))


def test_a_replay_takes_weights_at_their_step_in_every_mode() -> None:
    one = replaying(RequestsAdded(0, (("a", 0),), 2), WeightsTaken(1, 7, 3))
    one.waiting["a"] = Asked()
    one.ask_pause(7)
    assert next_of(one) == AddRequests(("a",))
    one.take("a")
    assert next_of(one, {"a": 1}) == RunStep()
    one.num_steps += 1
    assert next_of(one, {"a": 1}) == GrantPause()
    one.grant_pause()
    one.took_weights(7, ["a"])
    one.ask_pause(8)  # the journal is over: this one lets samples end
    assert next_of(one, {"a": 1}) == RunStep()


def test_a_replay_aborts_when_both_the_step_and_the_call_have_come() -> None:
    one = replaying(RequestsAdded(0, (("a", 0), ("b", 0)), 2), RequestsAborted(1, ("a",), 3))
    assert one.abort(["b"], ()) == ()  # it is known, and has not come yet
    one.waiting.update({"a": Asked(), "b": Asked()})
    assert next_of(one) == AddRequests(("a", "b"))
    one.waiting.clear()
    assert next_of(one, {"a": 1, "b": 1}) == RunStep()
    one.num_steps += 1
    assert next_of(one, {"a": 1, "b": 1}) == WaitFor(
        "the abort of request 'a', which was aborted after step 1 by journal/engine-0.jsonl:3"
    )
    assert one.abort(["a"], {"a", "b"}) == ()
    assert next_of(one, {"a": 1, "b": 1}) == AbortRequests(("a",))
    assert next_of(one, {"b": 1}) == AbortRequests(("b",))  # which the journal did not abort


def test_a_replay_goes_on_freely_only_after_the_steps_that_its_journal_has_seen() -> None:
    one = replaying(RequestsAdded(0, (("a", 0),), 2), StepsRan(2, 3))
    one.waiting.update({"a": Asked(), "stranger": Asked()})
    assert next_of(one) == AddRequests(("a",))
    one.take("a")
    for _ in range(2):
        assert next_of(one, {"a": 1}) == RunStep()
        one.num_steps += 1
    assert next_of(one, {"a": 1}) == AddRequests(("stranger",))


def test_a_replay_ends_when_all_requests_are_aborted_since_others_come_in_their_place() -> None:
    one = replaying(RequestsAdded(0, (("a", 0), ("b", 0)), 2), RequestsAdded(3, (("c", 0),), 3))
    one.waiting.update({"a": Asked(), "b": Asked()})
    assert next_of(one) == AddRequests(("a", "b"))
    for name in ("a", "b"):
        one.take(name)
    one.abort(["b"], ("a", "b"))
    one.waiting["c"] = Asked()
    assert one.abort_all(("a", "b")) == ("a", "b")
    assert not one.waiting
    one.waiting["a/again-1"] = Asked()
    assert next_of(one) == AddRequests(("a/again-1",))
    one.ask_pause(7)
    assert next_of(one) == GrantPause()


def test_what_finished_before_its_abort_in_the_journal_does_so_again_and_is_not_delivered() -> None:
    one = replaying(WeightsTaken(9, 1, 2))
    assert one.abort(["a"], {"a"}) == ()
    assert not one.is_wanted("a")
    assert one.is_wanted("b")


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (
            RequestsAdded(1, (("b", 5),), 2),
            r"engine-0\.jsonl:2: expected is request 'b', and it came with another prompt, seed or sampling",
        ),
        (WeightsTaken(1, 3, 2), "expected is policy version 3, and the trainer brings 4"),
        (RequestsAborted(1, ("c",), 2), "expected is the abort of request 'c', and it has finished"),
    ],
)
def test_a_journal_that_does_not_fit_is_an_error_that_names_its_line(
    event: JournalEvent, message: str
) -> None:
    one = replaying(RequestsAdded(0, (("c", 0),), 1), event)
    one.waiting["c"] = Asked()
    next_of(one)
    one.take("c")
    one.num_steps = 1
    one.waiting["b"] = Asked(digest=6)
    one.ask_pause(4)
    with pytest.raises(JournalError, match=message):
        next_of(one, {"a": 1})


def test_a_replay_whose_engine_has_ended_everything_too_early_is_an_error() -> None:
    with pytest.raises(
        JournalError, match="expected is of step 8, and the engine has nothing to decode after 2"
    ):
        next_of(replaying(WeightsTaken(8, 0, 2), num_steps=2))


def test_the_wait_for_what_a_journal_expects_has_a_deadline_that_other_calls_do_not_move() -> None:
    now = [100.0]
    one = replaying(RequestsAdded(0, (("a", 0),), 2), clock=lambda: now[0])
    assert one.patience_s() is None
    next_of(one)
    now[0] += 6
    one.waiting["stranger"] = Asked()
    next_of(one)
    assert one.patience_s() == pytest.approx(4)
    now[0] += 5
    with pytest.raises(
        JournalError,
        match=r"waited 10 s for request 'a', .*engine-0\.jsonl:2; 1 others came, such as 'stranger'",
    ):
        next_of(one)


class ToyEngine:
    """What depends on the order of events alone: a token is the version and the step that sampled it, and
    everything that ran in that step."""

    def __init__(self, of: EngineQueue[Asked]) -> None:
        self.queue = of
        self.version, self.is_paused = -1, False
        self.running: dict[str, Asked] = {}
        self.tokens: dict[str, list[tuple]] = {}
        self.delivered: dict[str, list[tuple]] = {}

    def advance(self) -> Action:
        num_sequences = sum(one.num_responses for one in self.running.values())
        action = self.queue.next(self.running.keys(), num_sequences, is_paused=self.is_paused)
        match action:
            case AddRequests():
                self.running |= {name: self.queue.take(name) for name in action.request_ids}
            case AbortRequests():
                self.drop(action.request_ids)
            case GrantPause():
                self.queue.grant_pause()
                self.is_paused = True
            case RunStep():
                self.step()
        return action

    def step(self) -> None:
        together = tuple(self.running)
        self.queue.num_steps += 1
        for name in together:
            tokens = self.tokens.setdefault(name, [])
            tokens.append((self.version, self.queue.num_steps, together))
            if len(tokens) == self.running[name].num_tokens:
                del self.running[name]
                if self.queue.is_wanted(name):
                    self.delivered[name] = tokens

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.running.pop(name, None)

    def abort(self, name: str) -> None:
        self.drop(self.queue.abort([name], self.running.keys()))

    def load(self, version: int) -> None:
        self.version, self.is_paused = version, False
        self.queue.took_weights(version, list(self.running))


@dataclasses.dataclass(frozen=True)
class Calls:
    """Callers of an engine, and in which of its rounds each call comes at the earliest."""

    requests: list[Asked]
    submits: list[int]
    aborts: list[tuple[int, int]]  # of which request, how many rounds after its submit
    pushes: list[int]  # of versions 0, 1, ...
    load_rounds: int  # from a pause to the loaded weights


def run(of: EngineQueue[Asked], calls: Calls) -> ToyEngine:
    engine = ToyEngine(of)
    aborts = {f"r{of}": calls.submits[of] + later for of, later in calls.aborts}
    versions, asked, paused = list(range(len(calls.pushes))), False, 0
    for now in range(400):
        for index, at in enumerate(calls.submits):
            if at == now:
                engine.queue.waiting[f"r{index}"] = calls.requests[index]
        for name, at in aborts.items():
            if at == now:
                engine.abort(name)
        if versions and not asked and now >= calls.pushes[versions[0]]:
            engine.queue.ask_pause(versions[0])
            asked = True
        if engine.is_paused:
            paused += 1
            if paused > calls.load_rounds:
                engine.load(versions.pop(0))
                asked, paused = False, 0
        engine.advance()
    assert not engine.running
    assert not engine.queue.waiting
    assert not versions
    return engine


ROUNDS = st.integers(0, 60)


@st.composite
def two_timings(draw: st.DrawFn) -> tuple[Calls, Calls]:
    """The same calls, at other times and in another order."""
    requests = draw(
        st.lists(st.builds(Asked, st.integers(1, 3), st.integers(1, 12), st.just(0)), min_size=1, max_size=8)
    )
    aborted = draw(st.lists(st.integers(0, len(requests) - 1), unique=True, max_size=3))
    num_versions = draw(st.integers(0, 3))
    live, again = (
        Calls(
            requests,
            [draw(ROUNDS) for _ in requests],
            [(index, draw(st.integers(0, 20))) for index in aborted],
            [draw(ROUNDS) for _ in range(num_versions)],
            draw(st.integers(0, 5)),
        )
        for _ in range(2)
    )
    return live, again


@pytest.mark.parametrize("updates", WeightUpdates)
@settings(max_examples=60)
@given(timings=two_timings())
def test_a_replay_repeats_every_step_whatever_the_timing_of_the_callers(
    updates: WeightUpdates, timings: tuple[Calls, Calls]
) -> None:
    live, again = timings
    with TemporaryDirectory() as directory:
        paths = [Path(directory) / f"{name}.jsonl" for name in ("live", "again")]
        first = run(queue(updates, writer=JournalWriter(paths[0], "engine-0", {})), live)
        first.queue.flush()
        journal, writer = JournalOrder(read_journal(paths[0])), JournalWriter(paths[1], "engine-0", {})
        second = run(queue(updates, journal=journal, writer=writer), again)
        second.queue.flush()
        assert second.tokens == first.tokens
        assert paths[1].read_text() == paths[0].read_text()
    aborted = {f"r{index}" for index, _ in live.aborts}
    assert second.delivered.keys() - aborted == first.delivered.keys() - aborted
    if updates is BETWEEN:
        assert all(len({version for version, _, _ in tokens}) == 1 for tokens in first.tokens.values())
