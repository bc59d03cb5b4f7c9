"""Environments that judge each turn by itself, and two functions that most of them use."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Awaitable, Callable, Sequence

from nemo_like.batch.columns import Column
from nemo_like.environments.interface import FailureKind, Feedback, Turn


class PerTurnEnvironment:
    """An environment that calls a function, plain or async, for each turn."""

    def __init__(
        self, judge: Callable[[Turn], Feedback | Awaitable[Feedback]], columns: tuple[Column, ...] = ()
    ) -> None:
        """Call ``judge`` for each turn; its feedback may bring ``columns``."""
        self._judge = judge
        self.columns_written = columns

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order; a failed one when the function raises."""
        return [await self._judged(turn) for turn in turns]

    async def _judged(self, turn: Turn) -> Feedback:
        try:
            answer = self._judge(turn)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            traceback.print_exc()
            return raised(error)


def raised(error: Exception) -> Feedback:
    """Return the feedback for a turn whose reward raised ``error``."""
    return Feedback.failed(FailureKind.raised, f"the reward raised {type(error).__name__}: {error}")


def extract_answer(response: str, pattern: str | None) -> str | None:
    """Return group 1 of the pattern's last match, or None without a match; "." matches newlines too.

    Without a pattern, return the whole response.
    """
    if pattern is None:
        return response
    matches = list(re.finditer(pattern, response, re.DOTALL))
    return matches[-1].group(1) if matches else None
