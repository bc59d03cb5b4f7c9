"""Closes connections of the endpoint on which nobody asks anything."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

_LOOKS = 4  # within the time that a connection may be silent


class SilenceWatch:
    """Closes every connection that for some time has no request under way.

    uvicorn closes those that are silent after a response. This also closes those whose first request never
    came, and those where the header of a request does not end.
    """

    def __init__(self, server: uvicorn.Server, silence_s: float) -> None:
        """Begin to watch, on the running event loop; a connection may be silent for ``silence_s``."""
        self._connections: set[Any] = server.server_state.connections
        self._silence_s, self._loop = silence_s, asyncio.get_running_loop()
        # By connection: its latest request, and when it was idle first.
        self._since: dict[Any, tuple[Any, float]] = {}
        self._timer = self._loop.call_later(silence_s / _LOOKS, self._look)

    def stop(self) -> None:
        """Leave the connections alone from now on."""
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
