"""Closes connections of the endpoint on which nobody asks anything."""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn

_LOOKS = 4  # within the time that a connection may be silent


async def close_silent(server: uvicorn.Server, silence_s: float) -> None:
    """Close, until cancelled, every connection that for ``silence_s`` has no request under way.

    uvicorn closes those that are silent after a response. This also closes those whose first request never
    came, and those where the header of a request does not end.
    """
    loop = asyncio.get_running_loop()
    connections: set[Any] = server.server_state.connections
    since: dict[Any, tuple[Any, float]] = {}  # by connection: its latest request, and when it was idle first
    while True:
        await asyncio.sleep(silence_s / _LOOKS)
        now = loop.time()
        idle = {one: one.cycle for one in connections if one.cycle is None or one.cycle.response_complete}
        since = {
            one: since[one] if one in since and since[one][0] is latest else (latest, now)
            for one, latest in idle.items()
        }
        for connection, (_, begun) in since.items():
            if now - begun >= silence_s:
                connection.transport.close()
