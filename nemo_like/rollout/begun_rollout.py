"""``BegunRollout``: a rollout under way in the rollout actor, which hands over its groups part by part."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from nemo_like.generation.interface import GroupResult
from nemo_like.observability.trace import span
from nemo_like.rollout.engine_load import EngineLoad
from nemo_like.rollout.prompts import PromptBatch, WantedGroups
from nemo_like.rollout.turn_loop import Engine, TurnLoop


@dataclass(frozen=True, slots=True)
class EndedGroups:
    """The groups of one part: their positions among the rollout's prompts, ascending, all of them ended."""

    positions: Sequence[int]
    is_last: bool
    is_whole: bool  # whether this part has all groups of the rollout


class BegunRollout:
    """The rollout of ``prompts`` into ``partition``. Use it on one event loop only."""

    def __init__(self, prompts: PromptBatch, partition: str) -> None:
        self.prompts, self.partition = prompts, partition
        self.loop: TurnLoop
        self._running: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None  # before the start
        self._settled = asyncio.Event()  # started, or failed before
        self._taken: set[int] = set()  # positions of the groups that were handed over
        self._num_at_work = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def start(self, loop: TurnLoop, engines: Sequence[Engine], sink: object, load: EngineLoad) -> None:
        """Start ``loop``, which holds the conversations, unless the rollout has already failed; see
        ``TurnLoop.run``. ``load`` notes when the rollout begins and ends."""
        if self._failure is None:
            self.loop = loop
            self._running = asyncio.get_running_loop().create_task(self._run(engines, sink, load))
            self._settled.set()

    async def next_groups(self, wanted: WantedGroups, timeout_s: float) -> EndedGroups:
        """Return the groups that have ended since the last part; see ``TurnLoop.ended_groups``."""
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        positions = await self.loop.ended_groups(self._taken, wanted, timeout_s)
        is_whole = len(positions) == len(self.loop.groups)
        self._taken.update(positions)
        return EndedGroups(positions, len(self._taken) == len(self.loop.groups), is_whole)

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the responses of an engine step; ignore responses of other rollouts."""
        if self._running is not None:
            self.loop.on_groups(results)

    def begin_step(self, step: int) -> None:
        """Call ``TurnLoop.begin_step``, unless the rollout has not started; then its loop learns the step at
        the start."""
        if self._running is not None:
            self.loop.begin_step(step)

    def fail(self, error: BaseException) -> None:
        """End the rollout with ``error``, which the wait for its next part raises."""
        if self._running is None:
            self._failure = error
            self._settled.set()
        else:
            self.loop.fail(error)

    async def ended(self) -> None:
        """Wait until no work for this rollout is left; call ``fail`` before."""
        if self._running is not None:
            await self._running
        await self._is_idle.wait()

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Make ``ended`` wait until this block has been left."""
        self._num_at_work += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_at_work -= 1
            if not self._num_at_work:
                self._is_idle.set()

    async def _run(self, engines: Sequence[Engine], sink: object, load: EngineLoad) -> None:
        load.begun()
        try:
            # Its error is suppressed here, because the wait for the next part raises it too.
            with span("generation"), suppress(Exception):
                await self.loop.run(engines, sink)
        finally:
            load.ended()
