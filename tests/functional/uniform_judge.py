"""A judge whose rewards tell nothing about many prompts, and who brings columns of a user's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nemo_like.environments.interface import Feedback, Turn
from tests.functional.own_columns import Judge
from tests.functional.uniform_rewards import mostly_uniform


class UniformJudge(Judge):
    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        judged = await super().step(turns)
        return [
            replace(one, rewards={"uniform": mostly_uniform(turn)})
            for one, turn in zip(judged, turns, strict=True)
        ]
