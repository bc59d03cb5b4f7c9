from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from nemo_like.environments.interface import Feedback, turn_number
from nemo_like.environments.pool import EnvironmentPool
from tests.unit.environments.asking import turn


@dataclass
class Actor:
    """Answers a call when the test opens the gate."""

    name: str
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    sizes: list[int] = field(default_factory=list)

    async def submit(self, method: str, turns: Any) -> list[Feedback]:
        assert method == "step"
        self.sizes.append(len(turns))
        await self.gate.wait()
        return [Feedback({"reward": 1.0})] * len(turns)


def test_a_call_goes_to_the_actor_with_the_fewest_turns_to_answer() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        first, second = Actor("first"), Actor("second")
        pool = EnvironmentPool([first, second])
        calls = []
        for size in (5, 2, 2, 2):
            calls.append(asyncio.create_task(pool.step([turn("a")] * size)))
            await asyncio.sleep(0)
        second.gate.set()
        await asyncio.gather(*calls[1:])
        # The second has answered everything, the first has still five to answer.
        assert pool.unanswered == ["first"]
        calls.append(asyncio.create_task(pool.step([turn("a")])))
        await calls[-1]
        first.gate.set()
        assert len(await calls[0]) == 5
        return first.sizes, second.sizes

    assert asyncio.run(scenario()) == ([5], [2, 2, 2, 1])


def test_the_turns_of_a_conversation_go_to_the_actor_that_keeps_its_episode() -> None:
    async def scenario() -> tuple[list[int], list[int]]:
        first, second = Actor("first"), Actor("second")
        pool = EnvironmentPool([first, second], keeps_episodes=True)
        first.gate.set()
        second.gate.set()
        for number in (1, 2, 3):
            turns = [turn("a", number=turn_number(0, generation, number)) for generation in range(3)]
            assert len(await pool.step(turns)) == 3
        return first.sizes, second.sizes

    assert asyncio.run(scenario()) == ([2, 2, 2], [1, 1, 1])
