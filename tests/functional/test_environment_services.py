"""Environments that need more than Python: programs in processes of their own, and a reward server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_like.environments.interface import Exchange, FailureKind, Feedback, Turn
from nemo_like.environments.programs import ProgramLimits, network_wall, run_program
from tests.unit.environments.asking import ask, turn

LIMITS = ProgramLimits(timeout_s=20.0, memory_mib=512)


# Programs


def code_turn(program: str, tests: Any) -> Turn:
    return turn(f"I think\n```python\n{program}\n```\nis right", data={"tests": tests})


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        ("def double(x): return 2 * x", "assert double(3) == 6", 1.0),
        ("def double(x): return x", "assert double(3) == 6", 0.0),
        ("def double(x)", "assert double(3) == 6", 0.0),
        (
            "print(int(input()) * 2 if input else 0)",
            [{"input": "3", "output": "6"}, {"input": "4", "output": "9"}],
            0.5,
        ),
    ],
)
def test_a_program_earns_the_share_of_tests_that_it_passes(program: str, tests: Any, passed: float) -> None:
    (feedback,) = ask("code", code_turn(program, tests), timeout_s=20.0)
    assert feedback.rewards == {"passed": passed}


def test_a_response_without_a_program_earns_nothing() -> None:
    assert ask("code", turn("no idea", data={"tests": ""}))[0].rewards == {"passed": 0.0}


def test_a_program_that_does_not_end_is_ended_with_what_it_started() -> None:
    source = "import subprocess, time; subprocess.Popen(['sleep', '3600']); time.sleep(3600)"
    result = asyncio.run(run_program(source, "", ProgramLimits(timeout_s=1.0, memory_mib=512)))
    assert result.exit_code is None


def test_a_program_has_no_more_memory_than_its_limit() -> None:
    result = asyncio.run(run_program("x = bytearray(2 * 2**30)", "", LIMITS))
    assert result.exit_code == 1


def test_a_program_cannot_fill_the_disk() -> None:
    source = "with open('big', 'wb') as file:\n    for _ in range(100):\n        file.write(bytes(10**6))"
    assert asyncio.run(run_program(source, "", LIMITS)).exit_code != 0


def test_a_program_does_not_see_the_environment_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "123")
    result = asyncio.run(run_program("import os; print('SECRET_TOKEN' in os.environ)", "", LIMITS))
    assert result.stdout == "False\n"


@pytest.mark.skipif(not network_wall(), reason="the system does not permit unshare --net")
def test_a_program_has_no_network() -> None:
    with serving(lambda body: (200, {})) as url:
        port = int(url.rpartition(":")[2].partition("/")[0])
        source = f"import socket; socket.create_connection(('127.0.0.1', {port}), timeout=5)"
        assert asyncio.run(run_program(source, "", LIMITS)).exit_code == 1
    (feedback,) = ask("code", code_turn("", ""), timeout_s=20.0)
    assert feedback.metrics == {"network_is_isolated": 1.0}


# A reward server


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """A server on this machine; ``answer(request body)`` gives status and content."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def ask_server(url: str, *turns: Turn) -> list[Feedback]:
    return ask("http", *turns, url=url, retry_pause_s=0.01, request_timeout_s=20.0)


def test_a_batch_of_turns_is_one_request_and_its_answers_come_back_in_order() -> None:
    seen: list[Any] = []

    def answer(body: Any) -> tuple[int, Any]:
        seen.append(body["turns"])
        goes_on = {"observation": "go on", "is_done": False, "state": 7, "metrics": {"length": 2}}
        return 200, {"feedback": [1, {"rewards": {"right": 0.5, "style": 0.25}}, goes_on, {"failure": "no"}]}

    asked = turn("a", "b", data={"level": 3}, history=(Exchange("x", "y"),), state=[1])
    with serving(answer) as url:
        number, named, goes_on, failed = ask_server(url, asked, turn("b"), turn("c"), turn("d"))
    assert len(seen) == 1
    assert seen[0][0] == {
        "prompt": "",
        "response": "a",
        "answer": "b",
        "is_truncated": False,
        "data": {"level": 3},
        "history": [{"response": "x", "observation": "y"}],
        "is_last": True,
        "state": [1],
    }
    assert number.rewards == {"reward": 1.0}
    assert named.rewards == {"right": 0.5, "style": 0.25}
    assert (goes_on.observation, goes_on.is_done, goes_on.state) == ("go on", False, 7)
    assert goes_on.metrics == {"length": 2.0}
    assert failed.failure is not None
    assert failed.failure.reason == "no"


def test_an_overloaded_server_is_asked_again() -> None:
    statuses = iter([503, 429, 200])
    with serving(lambda body: (next(statuses), {"feedback": [1.0]})) as url:
        assert ask_server(url, turn("a"))[0].reward == 1.0
    assert list(statuses) == []


@pytest.mark.parametrize(
    ("status", "content", "reason"),
    [
        (500, {}, "HTTPStatusError"),
        (404, {}, "HTTPStatusError"),
        (200, {"feedback": [1.0]}, "ValueError: 1 answers to 2 turns"),
        (200, {"rewards": [1.0, 1.0]}, "KeyError: 'feedback'"),
        (200, {"feedback": [1.0, {"rewards": {"a": "high"}}]}, "ValueError: could not convert"),
    ],
)
def test_a_server_without_a_sensible_answer_fails_the_samples_and_says_why(
    status: int, content: Any, reason: str
) -> None:
    with serving(lambda body: (status, content)) as url:
        feedback = ask_server(url, turn("a"), turn("b"))
    assert [item.failure.kind for item in feedback if item.failure] == [FailureKind.unreachable] * 2
    assert all(reason in item.failure.reason for item in feedback if item.failure)


def test_a_server_that_is_not_there_fails_the_samples() -> None:
    with serving(lambda body: (200, {})) as url:
        gone = url
    (feedback,) = ask_server(gone, turn("a"))
    assert feedback.failure is not None
    assert "ConnectError" in feedback.failure.reason
