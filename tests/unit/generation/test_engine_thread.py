"""The thread on which an engine runs its calls, and its work between them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from nemo_like.generation import engine_thread
from nemo_like.generation.engine_thread import EngineThread
from nemo_like.generation.interface import EngineOverdue, GenerationError

TIMEOUT_S = 30.0


class Work:
    """Work in as many pieces as are left; the last one raises, if there is an error."""

    def __init__(self, left: int = 0, error: Exception | None = None) -> None:
        self.left, self.error = left, error
        self.patience: float | None = None
        self.done: list[str] = []  # the thread that did each piece
        self.failures: list[tuple[str, str]] = []
        self.waits = threading.Event()

    def advance(self) -> bool:
        if not self.left:
            self.waits.set()
            return False
        self.left -= 1
        if self.error is not None and not self.left:
            raise self.error
        self.done.append(threading.current_thread().name)
        return True

    def patience_s(self) -> float | None:
        return self.patience

    def fail(self, error: GenerationError, reason: str) -> None:
        self.failures.append((str(error), reason))
        self.waits.set()


def begin(thread: EngineThread, work: Work) -> None:
    def set_work() -> None:
        thread.work = work

    thread.call(set_work)


@contextmanager
def broken_down(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Collects what makes the process count as dead."""
    found: list[str] = []
    monkeypatch.setattr(engine_thread, "break_down", lambda error, doing: found.append(f"{doing}{error}"))
    yield found


def test_calls_run_on_one_thread_and_return_or_raise() -> None:
    thread = EngineThread("e", TIMEOUT_S)
    assert {thread.call(lambda: threading.current_thread().name) for _ in range(3)} == {"e-step"}
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    assert thread.call(lambda: 7) == 7


def test_work_goes_on_without_calls_until_it_has_to_wait() -> None:
    thread, work = EngineThread("e", TIMEOUT_S), Work(left=5)
    begin(thread, work)
    assert work.waits.wait(TIMEOUT_S)
    assert work.done == ["e-step"] * 5
    work.waits.clear()
    thread.call(lambda: setattr(work, "left", 2))
    assert work.waits.wait(TIMEOUT_S)
    assert len(work.done) == 7


def test_work_with_patience_goes_on_when_no_call_comes() -> None:
    thread, work = EngineThread("e", TIMEOUT_S), Work()
    work.patience = 0.01
    begin(thread, work)
    assert work.waits.wait(TIMEOUT_S)
    work.left = 1
    work.waits.clear()
    assert work.waits.wait(TIMEOUT_S)
    assert len(work.done) == 1


def test_work_that_raises_fails_and_so_does_every_later_call(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, work = EngineThread("e", TIMEOUT_S), Work(left=2, error=KeyError("lost"))
    with broken_down(monkeypatch) as found:
        begin(thread, work)
        assert work.waits.wait(TIMEOUT_S)
    ((error, reason),) = work.failures
    assert error == f"engine 'e' failed: {reason}"
    assert "lost" in reason
    assert found == ["'lost'"]
    with pytest.raises(GenerationError, match=r"engine 'e' failed: .*lost"):
        thread.call(lambda: 7)


def test_a_call_without_memory_fails_the_engine_and_another_error_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def without_memory() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    thread, work = EngineThread("e", TIMEOUT_S), Work()
    begin(thread, work)
    with broken_down(monkeypatch), pytest.raises(torch.OutOfMemoryError):
        thread.call(without_memory)
    assert len(work.failures) == 1
    with pytest.raises(GenerationError):
        thread.call(lambda: 7)


def test_what_a_failing_engine_did_is_said_before_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    thread, work = EngineThread("e", TIMEOUT_S), Work()
    begin(thread, work)
    with broken_down(monkeypatch) as found:
        error = thread.call(lambda: thread.fail(ValueError("half"), "loading broke off: "))
    assert str(error).startswith("engine 'e' failed: loading broke off: ")
    assert found == ["loading broke off: half"]
    assert work.failures == [(str(error), str(error).removeprefix("engine 'e' failed: "))]


def test_an_engine_that_lost_a_process_ends_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    thread, work = EngineThread("e", TIMEOUT_S), Work()
    begin(thread, work)
    processes = [object()]
    monkeypatch.setattr(engine_thread.multiprocessing, "active_children", lambda: processes)
    monkeypatch.setattr(engine_thread, "end_process", ended.set)
    thread.needs_processes()
    with broken_down(monkeypatch):
        thread.call(lambda: thread.fail(ValueError("all there")))
        assert not ended.is_set()
    processes.clear()
    with broken_down(monkeypatch):
        thread.fail(ValueError("one is gone"))
    assert ended.is_set()


def test_a_call_that_takes_too_long_is_overdue() -> None:
    thread, free = EngineThread("e", 0.05), threading.Event()
    with pytest.raises(EngineOverdue, match=r"engine 'e' did not answer within 0\.05 s"):
        thread.call(lambda: free.wait(TIMEOUT_S))
    free.set()


def test_a_stopped_thread_ends_after_the_call_that_stops_it() -> None:
    thread = EngineThread("e", TIMEOUT_S)
    own: threading.Thread = thread.call(threading.current_thread)
    thread.call(thread.stop)
    own.join(TIMEOUT_S)
    assert not own.is_alive()
