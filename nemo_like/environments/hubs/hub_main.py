"""The process in which the environments of a hub's package run, by an interpreter that may have nothing else.

    start     {"adapter": "module:class", "options": {...}}        ──▶ {"ready": true} or {"refused": reason}
    problems  {"id": 1, "method": "problems", "arguments": {...}}  ──▶ {"id": 1, "result": [problem, ...]}
    step      {"id": 2, "method": "step", "arguments": {...}}      ──▶ {"id": 2, "result": outcome}
              what a call raised                                   ──▶ {"id": 2, "failed": {kind, reason}}

One JSON object per line, on standard input and output; what packages print goes to standard error. Standard
library only, but for the hub's own package. An episode stays here between its turns. One that is not here is
played again from its problem and its earlier responses, which must lead to the same observations.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import traceback
from collections import OrderedDict
from typing import Any, BinaryIO

from hub_interface import Episode, Hub, HubFailure

_MAX_EPISODES = 2048  # that stay between turns; of more, the one that waited longest is closed
_LONGEST_LINE = 256 << 20  # bytes


class _Played:
    """An episode, and what was said in it."""

    def __init__(self, episode: Episode) -> None:
        self.episode = episode
        self.exchanges: list[tuple[str, str]] = []  # responses and observations
        self.turn = asyncio.Lock()


class HubHost:
    """Answers the calls of one hub."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._played: OrderedDict[str, _Played] = OrderedDict()

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


async def _answered(host: HubHost, call: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"id": call["id"], "result": await getattr(host, call["method"])(**call["arguments"])}
    except HubFailure as failure:
        return {"id": call["id"], "failed": {"kind": failure.kind, "reason": failure.reason}}
    except Exception as error:
        traceback.print_exc()
        return {"id": call["id"], "failed": {"kind": "raised", "reason": f"{type(error).__name__}: {error}"}}


async def _serve(host: HubHost, answers: BinaryIO) -> None:
    reader = asyncio.StreamReader(limit=_LONGEST_LINE)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    calls: set[asyncio.Task[None]] = set()

    async def answer(call: dict[str, Any]) -> None:
        _write(answers, await _answered(host, call))

    while line := await reader.readline():
        task = loop.create_task(answer(json.loads(line)))
        calls.add(task)
        task.add_done_callback(calls.discard)
    if calls:
        await asyncio.wait(calls)


def _write(answers: BinaryIO, content: dict[str, Any]) -> None:
    answers.write(json.dumps(content).encode() + b"\n")
    answers.flush()


def _first_line() -> bytes:
    """Read the first line, and not a byte beyond it, which is for the event loop."""
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(0, 1)):
        line += byte
    return line


def main() -> None:
    """Build the hub that the first line names, and serve it until standard input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what packages print is no answer
    start = json.loads(_first_line())
    try:
        module, _, name = start["adapter"].partition(":")
        hub = getattr(importlib.import_module(module), name)(**start["options"])
    except Exception as error:
        traceback.print_exc()
        _write(answers, {"refused": f"{type(error).__name__}: {error}"})
        return
    _write(answers, {"ready": True})
    asyncio.run(_serve(HubHost(hub), answers))
    os._exit(0)  # packages leave threads behind


if __name__ == "__main__":
    main()
