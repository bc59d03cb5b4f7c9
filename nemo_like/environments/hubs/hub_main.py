"""The process in which a hub's package runs, with an interpreter that may have no other packages.

    start     ("module:class", options)                ──▶ null
    prompts   ("prompts", {"size": 8, "seed": 0})     ──▶ {"result": [prompt, ...]}
    step      ("step", {...})                          ──▶ {"result": outcome}
              where a sample cannot be judged          ──▶ {"failed": {kind, reason}}

Calls come in frames of JSON (``child_process/child_side.py``, whose folder is in PYTHONPATH). Standard
library only, but for the hub's own package. An episode stays here between its turns. An episode that is not
here is played again from its data and its earlier responses, which must lead to the same observations.
"""

from __future__ import annotations

import asyncio
import importlib
from collections import OrderedDict
from typing import Any

from child_side import JSON, ParentCalls
from hub_interface import Episode, Hub, HubFailure

_MAX_EPISODES = 2048  # kept between turns; beyond this, the episode that has waited longest is closed


class _Played:
    """An episode, with the responses and observations so far."""

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
        """Build the hub that ``adapter`` names, "module:class"."""
        module, _, name = adapter.partition(":")
        self._hub = getattr(importlib.import_module(module), name)(**options)

    async def answer(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Call the method ``method`` below and return its result, or the failure of the sample."""
        try:
            return {"result": await getattr(self, method)(**arguments)}
        except HubFailure as failure:
            return {"failed": {"kind": failure.kind, "reason": failure.reason}}

    async def prompts(self, size: int, seed: int) -> list[dict[str, Any]]:
        """Return ``size`` prompts, each with prompt, answer and data; ``step`` opens an episode from the
        data."""
        return [prompt.as_json() for prompt in await self._hub.prompts(size, seed)]

    async def step(
        self,
        episode: str,
        data: dict[str, Any],
        history: list[tuple[str, str]],
        response: str,
        is_last: bool,
    ) -> dict[str, Any]:
        """Give a response to an episode, and return the outcome.

        ``history`` has the earlier responses and observations. Raises HubFailure when playing it again gives
        other observations.
        """
        before = [(one, observed) for one, observed in history]
        played = self._played.pop(episode, None)
        if played is not None and played.exchanges != before:
            await played.episode.close()
            played = None
        if played is None:
            played = await self._again(data, before)
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

    async def _again(self, data: dict[str, Any], history: list[tuple[str, str]]) -> _Played:
        """Open an episode and play its history again."""
        played = _Played(await self._hub.open(data))
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
