from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_like.child_process import child_side
from nemo_like.child_process.child_side import JSON
from nemo_like.child_process.parent_side import CallRaised, Child, ChildDied, ChildFailed, ChildIsLate

TIMEOUT_S = 60.0

# Without packages, as an interpreter of its own may be.
SERVING = """
import asyncio, os, sys, time
from child_side import JSON, ParentCalls

async def answer(method, *arguments):
    if method == "sleep":
        await asyncio.sleep(*arguments)
    elif method == "block":
        time.sleep(*arguments)
    elif method == "raise":
        raise KeyError(*arguments)
    elif method == "leave":
        print("last", "words", file=sys.stderr)
        os._exit(3)
    elif method == "give up":
        sys.exit(4)
    elif method == "unsendable":
        return object()
    elif method == "pid":
        return os.getpid()
    elif method == "print":
        print(*arguments)
        return sys.stdin.read()
    return arguments

calls = ParentCalls(JSON)
if calls.answer_first(lambda divisor: 10 // divisor):
    calls.serve(answer)
"""
# ParentCalls every call before it reads the next one.
ECHO = """
import sys
from child_side import JSON, frame, next_frame

while True:
    call_id, (text,) = JSON.decode(next_frame(sys.stdin.buffer))
    answer = b"no JSON" if text == "unreadable" else JSON.encode((call_id, True, text))
    sys.stdout.buffer.write(frame(answer))
    sys.stdout.buffer.flush()
"""
Start = Callable[..., Child]


@pytest.fixture
def start() -> Iterator[Start]:
    children: list[Child] = []

    def started(program: str, **options: int) -> Child:
        environment = {"PYTHONPATH": str(Path(child_side.__file__).parent)}
        children.append(Child([sys.executable, "-S", "-c", program], environment, codec=JSON, **options))
        return children[-1]

    yield started
    for child in children:
        child.kill()


def result(child: Child, *arguments: object) -> Any:
    return child.call(*arguments, timeout_s=TIMEOUT_S).result()


@pytest.fixture
def serving(start: Start) -> Child:
    child = start(SERVING, stderr=subprocess.PIPE)
    assert result(child, 5) == 2
    return child


def test_calls_wait_side_by_side_and_each_gets_its_own_answer(serving: Child) -> None:
    async def scenario() -> list[object]:
        serving.call("sleep", 2 * TIMEOUT_S, timeout_s=None)  # others do not wait for its end
        calls = [serving.call("sleep", wait_s, timeout_s=TIMEOUT_S) for wait_s in (0.3, 0.1, 0.2)]
        return await asyncio.gather(*(call.returned() for call in calls))

    assert asyncio.run(scenario()) == [[0.3], [0.1], [0.2]]


def test_calls_and_answers_that_no_pipe_holds_do_not_wait_for_each_other(start: Start) -> None:
    """A socket holds some 200 KiB: here each side has much more to write than the other has read."""
    child, texts = start(ECHO), [f"{number}" * 20_000 for number in range(100)]
    calls = [child.call(text, timeout_s=TIMEOUT_S) for text in texts]
    assert [call.result() for call in calls] == texts


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("raise", "missing"), "KeyError: 'missing'"),
        (("unsendable",), "TypeError: Object of type object is not JSON serializable"),
    ],
)
def test_what_raises_or_cannot_be_sent_fails_its_own_call(
    serving: Child, call: tuple[str, ...], message: str
) -> None:
    with pytest.raises(CallRaised, match=message):
        result(serving, *call)
    assert result(serving, "again") == []


def test_a_first_call_that_raises_is_the_only_one(start: Start) -> None:
    child = start(SERVING)
    with pytest.raises(CallRaised, match="ZeroDivisionError: integer division or modulo by zero"):
        result(child, 0)
    with pytest.raises(ChildDied, match=r"^its process ended with exit code 0$"):
        result(child, "later")


def test_what_a_call_prints_is_no_answer_and_what_it_reads_is_nothing(serving: Child) -> None:
    assert result(serving, "print", "a line") == ""


@pytest.mark.parametrize(
    ("method", "how"), [("leave", "exit code 3: last words"), ("give up", "exit code 4: .*SystemExit: 4")]
)
def test_the_end_of_the_process_fails_every_call_and_says_how(serving: Child, method: str, how: str) -> None:
    waiting = serving.call("sleep", TIMEOUT_S, timeout_s=TIMEOUT_S)
    for call in (serving.call(method, timeout_s=TIMEOUT_S), waiting):
        with pytest.raises(ChildDied, match=f"its process ended with {how}"):
            call.result()
    assert not serving.is_alive
    with pytest.raises(ChildDied, match=how):
        asyncio.run(serving.call("later", timeout_s=TIMEOUT_S).returned())


def test_an_answer_that_cannot_be_read_fails_every_call(start: Start) -> None:
    child = start(ECHO)
    with pytest.raises(ChildDied) as died:
        result(child, "unreadable")
    assert died.value.how.startswith("an answer that cannot be read: JSONDecodeError")
    with pytest.raises(ChildDied):
        result(child, "later")


def test_a_call_past_its_deadline_is_late_and_leaves_the_others_alone(serving: Child) -> None:
    slow = serving.call("sleep", 1.0, timeout_s=0.1)
    with pytest.raises(ChildIsLate, match=r"no answer within 0\.1 s"):
        slow.result()
    with pytest.raises(TimeoutError, match=r"no answer within 0\.1 s"):
        asyncio.run(serving.call("sleep", 1.0, timeout_s=0.1).returned())
    assert result(serving, "sleep", 1.5) == [1.5]  # the late answers come before this one


def test_a_program_that_is_not_there_is_an_error_of_the_system() -> None:
    with pytest.raises(FileNotFoundError):
        Child(["/no/such/python"], {})


@pytest.mark.parametrize("method", ["sleep", "block"])
def test_a_child_that_serves_ends_with_its_parents_end(serving: Child, method: str) -> None:
    call = serving.call(method, TIMEOUT_S, timeout_s=TIMEOUT_S)
    serving.close(grace_s=TIMEOUT_S)
    assert not serving.is_alive
    with pytest.raises(ChildDied, match="exit code 0"):
        call.result()
    serving.close(grace_s=TIMEOUT_S)


def test_a_child_that_does_not_end_is_killed_although_calls_wait_to_be_written(serving: Child) -> None:
    process = psutil.Process(result(serving, "pid"))
    process.suspend()
    while process.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    call = serving.call("x" * (8 << 20), timeout_s=TIMEOUT_S)
    serving.close(grace_s=0.2)
    with pytest.raises(ChildFailed, match="signal SIGKILL"):
        call.result()
