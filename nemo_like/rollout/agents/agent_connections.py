"""Closes connections of the agents' endpoint that have been silent for too long."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

_LOOKS = 4  # within the time that a connection may be silent


class SilenceWatch:
    """Closes every connection that has had no request under way for ``silence_s`` seconds.

    uvicorn itself closes connections that are silent after a response. This class also closes connections on
    which the first request never came, and connections on which a request's header does not end.
    """

    def __init__(self, server: uvicorn.Server, silence_s: float) -> None:
        """Begin to watch the server's connections, on the running event loop."""
        self._connections: set[Any] = server.server_state.connections
        self._silence_s, self._loop = silence_s, asyncio.get_running_loop()
        # By connection: its latest request, and when it was idle first.
        self._since: dict[Any, tuple[Any, float]] = {}
        self._timer = self._loop.call_later(silence_s / _LOOKS, self._look)

    def stop(self) -> None:
        """Stop watching, and close no more connections."""
        self._timer.cancel()

    def _look(self) -> None:
        now = self._loop.time()
        idle = {
            one: one.cycle for one in self._connections if one.cycle is None or one.cycle.response_complete
        }
        self._since = {
            one: known if (known := self._since.get(one)) and known[0] is latest else (latest, now)
            for one, latest in idle.items()
        }
        for connection, (_, begun) in self._since.items():
            if now - begun >= self._silence_s:
                connection.transport.close()
        self._timer = self._loop.call_later(self._silence_s / _LOOKS, self._look)
