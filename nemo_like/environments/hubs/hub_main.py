"""The process in which the environments of a hub's package run, by an interpreter that may have nothing else.

    start     ("module:class", options)                ──▶ null
    problems  ("problems", {"size": 8, "seed": 0})     ──▶ {"result": [problem, ...]}
    step      ("step", {...})                          ──▶ {"result": outcome}
              where a sample cannot be judged          ──▶ {"failed": {kind, reason}}

Calls come in frames of JSON (``child_process/child_side.py``, whose folder is in PYTHONPATH). Standard
library only, but for the hub's own package. An episode stays here between its turns. One that is not here is
played again from its problem and its earlier responses, which must lead to the same observations.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import OrderedDict
from typing import Any

from child_side import JSON, ParentCalls
from hub_interface import Episode, Hub, HubFailure

_MAX_EPISODES = 2048  # that stay between turns; of more, the one that waited longest is closed


class _Played:
    """An episode, and what was said in it."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.exchanges: list[tuple[str, str]] = []  # responses and observations
        self.turn = asyncio.Lock()


class HubHost:
    """Answers the calls of one hub."""

    def __init__(self) -> None:
        self._hub: Hub
        self._played: OrderedDict[str, _Played] = OrderedDict()

    def start(self, adapter: str, options: dict[str, Any]) -> None:
        """Build the hub that ``adapter`` names."""
        module, _, name = adapter.partition(":")
        self._hub = getattr(importlib.import_module(module), name)(**options)

    async def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return what a method below returns, or that the sample cannot be judged."""
        try:
            return {"result": await getattr(self, method)(**arguments)}
        except HubFailure as failure:
            return {"failed": {"kind": failure.kind, "reason": failure.reason}}

    async def problems(self, size: int, seed: int) -> list[dict[str, Any]]:
        """Return ``size`` problems: prompt, answer and data, by which ``step`` opens an episode."""
        return [problem.as_json() for problem in await self._hub.problems(size, seed)]

    async def step(
        self,
        episode: str,
        problem: dict[str, Any],
        history: list[tuple[str, str]],
        response: str,
        is_last: bool,
    ) -> dict[str, Any]:
        """Give a response to an episode, and return what came of it.

        ``history`` has the responses and observations before. Raises HubFailure when a replay goes elsewhere.
        """
        before = [(one, observed) for one, observed in history]
        played = self._played.pop(episode, None)
        if played is not None and played.exchanges != before:
            await played.episode.close()
            played = None
        if played is None:
            played = await self._again(problem, before)
        async with played.turn:
            try:
                outcome = await played.episode.step(response, is_last)
            except BaseException:
                await played.episode.close()
                raise
        if outcome.is_done or is_last:
            await played.episode.close()
        else:
            played.exchanges.append((response, outcome.observation))
            self._played[episode] = played
            await self._make_room()
        return outcome.as_json()

    async def _again(self, problem: dict[str, Any], history: list[tuple[str, str]]) -> _Played:
        """Open an episode and play its history."""
        played = _Played(await self._hub.open(problem))
        try:
            for number, (response, observed) in enumerate(history, start=1):
                outcome = await played.episode.step(response, False)
                if outcome.is_done or outcome.observation != observed:
                    raise HubFailure(
                        "raised",
                        f"the episode was played again, since another process had it, and turn {number} came "
                        f"out otherwise: {outcome.observation[:200]!r}, not {observed[:200]!r}; the "
                        "environment does not follow from its seed",
                    )
                played.exchanges.append((response, observed))
        except BaseException:
            await played.episode.close()
            raise
        return played

    async def _make_room(self) -> None:
        while len(self._played) > _MAX_EPISODES:
            _, oldest = self._played.popitem(last=False)
            await oldest.episode.close()


def main() -> None:
    calls, host = ParentCalls(JSON), HubHost()
    if calls.answer_first(host.start):
        calls.serve(host.answer)


if __name__ == "__main__":
    main()
