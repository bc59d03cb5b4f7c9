"""Environments that judge each turn by itself."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence

from nemo_like.batch.columns import Column
from nemo_like.environments.interface import FailureKind, Feedback, Turn


class PerTurnEnvironment:
    """An environment made of a function of one turn, plain or async."""

    def __init__(
        self, judge: Callable[[Turn], Feedback | Awaitable[Feedback]], columns: tuple[Column, ...] = ()
    ) -> None:
        """``columns`` are those that the feedback may bring."""
        self._judge = judge
        self.columns_written = columns

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """One feedback per turn; a failed one where the function raises."""
        return [await self._judged(turn) for turn in turns]

    async def _judged(self, turn: Turn) -> Feedback:
        try:
            answer = self._judge(turn)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            traceback.print_exc()
            return raised(error)


def raised(error: Exception) -> Feedback:
    """Feedback for a turn whose reward raised this."""
    return Feedback.failed(FailureKind.raised, f"the reward raised {type(error).__name__}: {error}")


def extract_answer(response: str, pattern: str | None) -> str | None:
    """Group 1 of the last match, "." matching newlines too; without a pattern the whole response.

    None when nothing matches.
    """
    if pattern is None:
        return response
    matches = list(re.finditer(pattern, response, re.DOTALL))
    return matches[-1].group(1) if matches else None
