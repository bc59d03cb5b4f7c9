"""Small requests over ZeroMQ: several times faster than an actor call, and the registry is asked a lot.

Trusted peers only, as everything that TransferQueue and Ray open: bodies are pickled.
"""

from __future__ import annotations

import asyncio
import itertools
import pickle
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import zmq
import zmq.asyncio

Handler = Callable[..., Awaitable[Any]]


class RpcServer:
    """Answers requests on the running event loop; each in a task of its own, so one may wait for another."""

    def __init__(self, host: str, handlers: Mapping[str, Handler]) -> None:
        self._handlers = handlers
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self.address = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self._tasks: set[asyncio.Task[None]] = set()
        self._start(self._serve())

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._context.destroy(linger=0)

    async def _serve(self) -> None:
        while True:
            peer, number, body = await self._socket.recv_multipart()
            self._start(self._answer(peer, number, body))

    async def _answer(self, peer: bytes, number: bytes, body: bytes) -> None:
        try:
            method, args = pickle.loads(body)
            answer = (True, await self._handlers[method](*args))
        except Exception as error:
            answer = (False, error)
        await self._socket.send_multipart([peer, number, pickle.dumps(answer, protocol=5)])

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class RpcClient:
    """Requests from one event loop; any number may be under way. Create and use it on that loop."""

    def __init__(self, address: str) -> None:
        self._context = zmq.asyncio.Context(io_threads=1)
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(address)
        self._numbers = itertools.count()
        self._answers: dict[bytes, asyncio.Future[tuple[bool, Any]]] = {}
        self._receiver = asyncio.get_running_loop().create_task(self._receive())

    async def call(self, method: str, *args: Any) -> Any:
        """The handler's result; raises what it raised. Waits without end: the caller brings the deadline."""
        number = b"%d" % next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            await self._socket.send_multipart([number, pickle.dumps((method, args), protocol=5)])
            succeeded, value = await answer
        finally:
            del self._answers[number]
        if succeeded:
            return value
        raise value

    async def close(self) -> None:
        self._receiver.cancel()
        await asyncio.wait([self._receiver])
        self._context.destroy(linger=0)

    async def _receive(self) -> None:
        while True:
            number, body = await self._socket.recv_multipart()
            # The answer to a request that was given up comes late, and nobody waits for it.
            if number in self._answers and not self._answers[number].done():
                self._answers[number].set_result(pickle.loads(body))
