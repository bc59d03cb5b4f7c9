"""The connections that lead from an agent's sandbox to the endpoint."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from nemo_like.environments.sandboxed import agent_main

_FILLING_S = 0.3  # a long request has filled all buffers on its way then
REFUSAL = b"HTTP/1.1 413 Content Too Large\r\nConnection: close\r\n\r\n"


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """The address in the sandbox of an endpoint that refuses every request without reading it."""
    path = str(tmp_path / "endpoint")
    endpoint = socket.socket(socket.AF_UNIX)
    endpoint.bind(path)
    endpoint.listen()

    def refuse() -> None:
        while True:
            try:
                caller, _ = endpoint.accept()
            except OSError:
                return
            with caller, suppress(BrokenPipeError):
                caller.recv(1)
                time.sleep(_FILLING_S)
                caller.sendall(REFUSAL)

    listening = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=refuse, daemon=True).start()
    threading.Thread(target=agent_main._serve, args=(listening, path), daemon=True).start()
    yield listening.getsockname()
    endpoint.close()


def call(address: tuple[str, int], num_bytes: int) -> bytes:
    """Send so much and return the answer. Raises OSError where the connection ends while it sends."""
    with socket.create_connection(address, timeout=10) as client:
        client.sendall(bytes(num_bytes))
        return client.recv(1024)


def test_a_short_request_that_is_refused_gets_the_answer(inside: tuple[str, int]) -> None:
    assert call(inside, 1) == REFUSAL


def test_a_request_that_is_refused_before_its_end_does_not_leave_its_client_waiting(
    inside: tuple[str, int],
) -> None:
    started_s = time.monotonic()
    with pytest.raises(ConnectionError):
        call(inside, 64 << 20)
    assert time.monotonic() - started_s < 5
    assert call(inside, 1) == REFUSAL


def test_a_connection_for_which_no_thread_is_left_is_closed_and_the_next_is_led(
    inside: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", _no_more)
        with suppress(ConnectionError):
            assert call(inside, 1) == b""
    assert call(inside, 1) == REFUSAL


def _no_more(self: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")
