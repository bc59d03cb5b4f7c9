"""Requests and answers between threads: each gets its own, and nobody waits for ever."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zmq

from nemo_like.data_plane.exchange import Alarm, Exchange, GaveUp, Request

LONG_S = 20.0


class Echo:
    """Answers each request with itself, late ones (``late``) when ``release`` is set."""

    def __init__(self) -> None:
        self.release = threading.Event()
        self._socket = zmq.Context.instance().socket(zmq.ROUTER)
        self.address = f"tcp://127.0.0.1:{self._socket.bind_to_random_port('tcp://127.0.0.1')}"
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            peer, body = self._socket.recv_multipart()
            if body == b"late":
                self.release.wait(LONG_S)
            self._socket.send_multipart([peer, body])
            if body == b"end":
                return self._socket.close(linger=1000)


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.release.set()
    exchange = Exchange("ending", Alarm(), "127.0.0.1")
    exchange.ask([Request(server.address, [b"end"])], LONG_S)
    exchange.close()


@pytest.fixture
def exchange() -> Iterator[Exchange]:
    exchange = Exchange("test", Alarm(), "127.0.0.1")
    yield exchange
    exchange.close()


def answer(exchange: Exchange, server: Echo, body: bytes, timeout_s: float = LONG_S) -> bytes:
    ((frame,),) = exchange.ask([Request(server.address, [body])], timeout_s)
    return frame.bytes


def test_threads_get_the_answers_to_their_own_requests(exchange: Exchange, echo: Echo) -> None:
    bodies = [b"%d" % number for number in range(200)]
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(lambda body: answer(exchange, echo, body), bodies)) == bodies


def test_a_late_answer_is_not_taken_for_that_of_the_next_request(exchange: Exchange, echo: Echo) -> None:
    with pytest.raises(GaveUp):
        answer(exchange, echo, b"late", timeout_s=0.05)
    echo.release.set()
    assert answer(exchange, echo, b"next") == b"next"


def test_an_alarm_ends_the_waits_under_way_and_those_to_come(echo: Echo) -> None:
    alarm = Alarm()
    exchange = Exchange("test", alarm, "127.0.0.1")
    began = time.monotonic()
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(answer, exchange, echo, b"late")
        alarm.ring()
        for under_way in (waiting, threads.submit(answer, exchange, echo, b"late")):
            with pytest.raises(GaveUp):
                under_way.result(LONG_S)
    assert time.monotonic() - began < LONG_S
    exchange.close()
