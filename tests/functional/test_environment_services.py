"""Rewards from a server."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from nemo_like.config.secrets import referring
from nemo_like.environments.interface import Exchange, FailureKind, Feedback, Turn
from nemo_like.environments.server import EnvironmentServer
from tests.unit.environments.asking import ask, turn
from tests.unit.environments.configs import env_config


@contextmanager
def serving(answer: Any) -> Iterator[str]:
    """A server on this machine; ``answer(request body)`` gives status and content, which is sent as it is
    where it is bytes."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            status, content = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            body = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
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
    ("status", "content", "kind", "reason"),
    [
        (500, {"error": "no model"}, FailureKind.unreachable, 'status 500: {"error": "no model"}'),
        (404, {}, FailureKind.unreachable, "status 404: {}"),
        (200, {"feedback": [1.0]}, FailureKind.malformed, "the answer has 1 entries for 2 turns"),
        (200, {"rewards": [1.0, 1.0]}, FailureKind.malformed, 'the answer is not {"feedback": [...]}'),
        (200, [1.0, 1.0], FailureKind.malformed, 'the answer is not {"feedback": [...]}'),
    ],
)
def test_a_server_without_an_answer_for_every_turn_fails_the_samples_and_says_what_it_was_sent_and_gave(
    status: int, content: Any, kind: FailureKind, reason: str
) -> None:
    with serving(lambda body: (status, content)) as url:
        feedback = ask_server(url, turn("good"), turn("b"))
    assert [item.failure.kind for item in feedback if item.failure] == [kind] * 2
    for item in feedback:
        assert item.failure is not None
        assert reason in item.failure.reason
        assert json.dumps(content) in item.failure.reason
        assert f"POST {url} gave" in item.failure.reason
        assert 'sent was {"turns": [{"prompt": "", "response": "good"' in item.failure.reason


@pytest.mark.parametrize(
    ("entry", "kind", "reason"),
    [
        ({"rewards": {"a": "high"}}, FailureKind.malformed, "the reward 'a' is 'high', not a number"),
        ({"score": 1.0}, FailureKind.malformed, "has neither rewards nor observation"),
        ("good", FailureKind.malformed, 'the server\'s entry "good" is no number'),
        (None, FailureKind.abstained, "the reward is None"),
        ({"rewards": {"a": float("nan")}}, FailureKind.not_finite, "the reward 'a' is nan"),
        ({"rewards": 1.0}, FailureKind.malformed, "the rewards are 1.0, not a mapping"),
    ],
)
def test_a_malformed_entry_of_a_server_costs_its_own_sample(
    entry: Any, kind: FailureKind, reason: str
) -> None:
    async def step(url: str) -> list[Feedback]:
        server = EnvironmentServer("judge", env_config("http", options={"url": url}))
        try:
            return await server.step([turn("a"), turn("b"), turn("c")])
        finally:
            await server.close()

    with serving(lambda body: (200, {"feedback": [1.0, entry, 0.5]})) as url:
        first, malformed, last = asyncio.run(step(url))
    assert (first.reward, last.reward) == (1.0, 0.5)
    assert malformed.failure is not None
    assert malformed.failure.kind is kind
    assert reason in malformed.failure.reason


def test_a_failure_does_not_tell_what_an_environment_variable_said() -> None:
    with serving(lambda body: (200, {})) as gone:
        pass
    cfg = env_config("http", options={"url": gone})
    cfg.options["url"] = referring(gone + "/hunter2", "${oc.env:URL}")

    async def step() -> list[Feedback]:
        server = EnvironmentServer("judge", cfg)
        try:
            return await server.step([turn("a")])
        finally:
            await server.close()

    (feedback,) = asyncio.run(step())
    assert feedback.failure is not None
    assert "POST ${oc.env:URL} gave ConnectError" in feedback.failure.reason
    assert "hunter2" not in feedback.failure.reason


def test_a_server_that_is_not_there_fails_the_samples() -> None:
    with serving(lambda body: (200, {})) as url:
        gone = url
    (feedback,) = ask_server(gone, turn("a"))
    assert feedback.failure is not None
    assert "ConnectError" in feedback.failure.reason
