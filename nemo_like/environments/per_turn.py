"""Environments that judge each turn by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_like.environments.interface import Feedback, Turn


class PerTurnEnvironment:
    """An environment made of a function of one turn."""

    def __init__(self, judge: Callable[[Turn], Feedback]) -> None:
        self._judge = judge

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [self._judge(turn) for turn in turns]
