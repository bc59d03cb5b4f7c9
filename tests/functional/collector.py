"""A sink of engines, apart from other fixtures so that its process loads no library of models."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nemo_like.generation.interface import GroupResult


class Collector:
    """A sink: keeps what engines deliver, in the order of arrival."""

    def __init__(self) -> None:
        self._results: dict[str, GroupResult] = {}
        self._calls: list[int] = []
        self._errors: list[tuple[str, str]] = []
        self._changed = asyncio.Condition()

    async def on_groups(self, results: Sequence[GroupResult]) -> None:
        async with self._changed:
            self._results |= {result.request_id: result for result in results}
            self._calls.append(len(results))
            self._changed.notify_all()

    async def on_engine_error(self, engine: str, message: str) -> None:
        async with self._changed:
            self._errors.append((engine, message))
            self._changed.notify_all()

    async def wait_for(self, request_ids: Sequence[str], timeout_s: float) -> list[GroupResult]:
        async with self._changed, asyncio.timeout(timeout_s):
            await self._changed.wait_for(lambda: set(request_ids) <= self._results.keys())
        return [self._results[request_id] for request_id in request_ids]

    async def wait_for_error(self, timeout_s: float) -> tuple[str, str]:
        async with self._changed, asyncio.timeout(timeout_s):
            await self._changed.wait_for(lambda: bool(self._errors))
        return self._errors[0]

    def forget(self) -> None:
        """Be as new: for the next of several engines, whose groups have the names of these."""
        self._results, self._calls, self._errors = {}, [], []

    def received(self) -> list[str]:
        """Ids in the order of arrival."""
        return list(self._results)

    def calls(self) -> list[int]:
        """Groups per ``on_groups`` call."""
        return list(self._calls)
