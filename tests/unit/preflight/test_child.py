from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nemo_like.child_process.parent_side import ChildFailed, ChildIsLate
from nemo_like.preflight.child import ChildCall
from tests.unit.forked_checks import ForkedCall

TIMEOUT_S = 60.0


def sum_while_talking(a: int, b: int) -> int:
    print("a line on stdout")
    os.write(1, b"and one past Python\n")
    return a + b


def raise_error() -> None:
    raise KeyError("missing")


def die() -> None:
    print("last words", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)


def leave() -> None:
    os._exit(7)


def complain_at_length() -> None:
    for number in range(1000):
        print(f"{number}: {'x' * 10_000}", file=sys.stderr)
    print("the last word", file=sys.stderr, flush=True)
    os._exit(3)


def hang_with_a_child(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "1000"])
    Path(pid_file).write_text(str(child.pid))
    time.sleep(1000)


def read_from(pipe: str) -> str:
    return Path(pipe).read_text()


def write_to(pipe: str) -> None:
    Path(pipe).write_text("met")


@pytest.fixture(params=[ChildCall, ForkedCall], ids=["started", "forked"])
def child_call(request: pytest.FixtureRequest) -> type[ChildCall]:
    """What a run's checks use, and what unit tests of them use."""
    return request.param


def test_the_answer_comes_back_whatever_the_function_prints(
    child_call: type[ChildCall], capfd: pytest.CaptureFixture[str]
) -> None:
    with child_call(sum_while_talking, 2, 3, timeout_s=TIMEOUT_S) as call:
        assert call.result() == 5
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raise_error, "KeyError: 'missing'"),
        (die, "its process ended with signal SIGSEGV: last words"),
        (leave, "its process ended with exit code 7"),
    ],
)
def test_a_function_that_fails_is_told_with_its_reason(
    child_call: type[ChildCall], function, message: str
) -> None:
    with child_call(function, timeout_s=TIMEOUT_S) as call, pytest.raises(ChildFailed, match=message):
        call.result()


def test_of_what_a_function_complains_only_the_end_is_kept(child_call: type[ChildCall]) -> None:
    with child_call(complain_at_length, timeout_s=TIMEOUT_S) as call:
        with pytest.raises(ChildFailed, match=r"exit code 3: .* \| the last word$"):
            call.result()
        assert len(call._child._errors._end) <= 1 << 16


def test_a_function_that_hangs_is_ended_with_all_that_it_started(
    child_call: type[ChildCall], tmp_path: Path
) -> None:
    pid_file = tmp_path / "pid"
    os.mkfifo(pid_file)
    with child_call(hang_with_a_child, str(pid_file), timeout_s=0.1) as call:
        grandchild = psutil.Process(int(pid_file.read_text()))  # waits until there is one
        with pytest.raises(ChildIsLate, match=r"no answer within 0\.1 s"):
            call.result()
    _, alive = psutil.wait_procs([grandchild], timeout=10)
    assert [process.status() for process in alive] in ([], [psutil.STATUS_ZOMBIE])


def test_calls_run_side_by_side(child_call: type[ChildCall], tmp_path: Path) -> None:
    """Each waits for the other to open its end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with (
        child_call(read_from, str(pipe), timeout_s=TIMEOUT_S) as reader,
        child_call(write_to, str(pipe), timeout_s=TIMEOUT_S) as writer,
    ):
        assert reader.result() == "met"
        writer.result()
