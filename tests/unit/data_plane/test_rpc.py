"""Requests to a server on an event loop: answered at once, or when there is something to answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from nemo_like.data_plane.errors import MissingData
from nemo_like.data_plane.exchange import Alarm, Exchange, Request
from nemo_like.data_plane.rpc import RpcServer, decode_answer, encode_call

LONG_S = 20.0


class Served:
    """A server on a loop of its own, and requests to it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self.opened = asyncio.Event()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(LONG_S)
        self._exchange = Exchange("test", Alarm(), "127.0.0.1")

    async def _start(self) -> RpcServer:
        def refuse(why: str) -> None:
            raise MissingData(why)

        async def wait(value: int) -> int:
            async with asyncio.timeout(LONG_S):
                await self.opened.wait()
            return value

        return RpcServer(
            "127.0.0.1", {"add": int.__add__, "refuse": refuse, "wait": wait, "open": self._open}
        )

    def _open(self) -> None:
        self.opened.set()

    def ask(self, method: str, *args: Any) -> Any:
        (frames,) = self._exchange.ask([Request(self._server.address, encode_call(method, args))], LONG_S)
        return decode_answer(frames)

    def stop(self) -> None:
        self._exchange.close()
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LONG_S)


@pytest.fixture
def served() -> Iterator[Served]:
    served = Served()
    yield served
    served.stop()


def test_requests_of_many_threads_are_all_answered(served: Served) -> None:
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda number: served.ask("add", number, 1), range(400)))
    assert answers == list(range(1, 401))


def test_what_a_handler_raises_is_raised_at_the_caller(served: Served) -> None:
    with pytest.raises(MissingData, match="not there"):
        served.ask("refuse", "not there")
    with pytest.raises(KeyError, match="typo"):
        served.ask("typo")


def test_those_who_wait_are_answered_when_another_request_lets_them_go_on(served: Served) -> None:
    with ThreadPoolExecutor(9) as threads:
        waiting = [threads.submit(served.ask, "wait", number) for number in range(8)]
        assert served.ask("add", 1, 1) == 2
        assert not any(one.done() for one in waiting)
        served.ask("open")
        assert [one.result(LONG_S) for one in waiting] == list(range(8))
        assert [served.ask("wait", number) for number in range(50)] == list(range(50))
