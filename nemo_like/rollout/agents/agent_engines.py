"""Sends the calls of agents to the engines, and hands each result to the call that waits for it.

call ─┐
call ─┼─ one submit per engine and sampling ──▶ engine ──▶ on_groups ──▶ the futures of the calls
call ─┘  (of one turn of the event loop)
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nemo_like.batch.columnar import Columnar
from nemo_like.generation.interface import CallSampling, GroupRequest, GroupResult
from nemo_like.rollout.agents.agent_request import BadRequest
from nemo_like.rollout.turn_loop import Engine


class EngineCalls:
    """The agents' calls that engines have yet to answer. Use it on one event loop only."""

    def __init__(self, engines: Sequence[Engine], sink: object) -> None:
        self._engines, self._sink = engines, sink
        self._waiting: dict[str, asyncio.Future[GroupResult]] = {}
        self._queued: list[tuple[int, GroupRequest, CallSampling]] = []
        self._sending: set[asyncio.Task[None]] = set()

    def move_to(self, engines: Sequence[Engine]) -> None:
        """Send later calls to these engines; some may be new."""
        self._engines = engines

    @property
    def num_engines(self) -> int:
        return len(self._engines)

    @property
    def num_waiting(self) -> int:
        """The number of calls that no engine has answered yet."""
        return len(self._waiting)

    async def sample(self, engine: int, request: GroupRequest, sampling: CallSampling) -> GroupResult:
        """Have an engine sample the request, and return the result. A call that is cancelled is aborted on
        the engine.

        Raises BadRequest when the engine refuses the request, and the error given to ``fail``.
        """
        loop = asyncio.get_running_loop()
        answered = self._waiting[request.request_id] = loop.create_future()
        if not self._queued:
            loop.call_soon(self._flush)
        self._queued.append((engine, request, sampling))
        try:
            return await answered
        except asyncio.CancelledError:
            await self._drop(engine, {request.request_id} & self._waiting.keys())
            raise
        finally:
            self._waiting.pop(request.request_id, None)

    async def drop(self, engine: int, beginning: str) -> None:
        """Refuse the waiting calls whose request ids start with ``beginning``; return once the engine has
        aborted them.

        An engine that generates takes no weights and does not sleep, so it must not go on with abandoned
        calls.
        """
        await self._drop(engine, {name for name in self._waiting if name.startswith(beginning)})

    async def _drop(self, engine: int, names: set[str]) -> None:
        unsent = {request.request_id for _, request, _ in self._queued} & names
        self._queued = [one for one in self._queued if one[1].request_id not in unsent]
        for name in names:
            answered = self._waiting[name]  # until its caller has gone on, or its abort has come back
            if not answered.done():
                answered.set_exception(BadRequest("the session has ended", status=410, code="session_ended"))
        if sent := sorted(names - unsent):
            await self._engines[engine].submit("abort", sent)

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the results of an engine's step; ignore results of requests that no call waits for."""
        for result in results:
            answered = self._waiting.get(result.request_id)
            if answered is not None and not answered.done():
                answered.set_result(result)

    def fail(self, error: BaseException) -> None:
        """Raise ``error`` in every call that waits."""
        self._queued.clear()
        for answered in self._waiting.values():
            if not answered.done():
                answered.set_exception(error)

    def _flush(self) -> None:
        queued, self._queued = self._queued, []
        calls: dict[tuple[int, CallSampling], list[GroupRequest]] = {}
        for engine, request, sampling in queued:
            calls.setdefault((engine, sampling), []).append(request)
        for (engine, sampling), requests in calls.items():
            task = asyncio.get_running_loop().create_task(self._send(engine, requests, sampling))
            self._sending.add(task)
            task.add_done_callback(self._sending.discard)

    async def _send(self, engine: int, requests: Sequence[GroupRequest], sampling: CallSampling) -> None:
        """Submit requests together. When the engine refuses them, submit each alone, to refuse only the
        faulty ones."""
        try:
            await self._engines[engine].submit("submit", Columnar(requests), sampling, self._sink)
        except Exception as error:
            if len(requests) == 1:
                self._refuse(requests[0].request_id, error)
                return
            left = [request for request in requests if request.request_id in self._waiting]
            await asyncio.gather(*(self._send(engine, [request], sampling) for request in left))

    def _refuse(self, request_id: str, error: Exception) -> None:
        answered = self._waiting.get(request_id)
        if answered is not None and not answered.done():
            # The last line of what an actor raised says what was wrong; the rest is its traceback.
            answered.set_exception(BadRequest(str(error).strip().rpartition("\n")[2]))
