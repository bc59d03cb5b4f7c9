"""Rewards and environments that users write, by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_like.config.environment_options import CustomOptions, FunctionOptions
from nemo_like.config.import_path import load_by_path
from nemo_like.environments.interface import Environment, Feedback, Turn


def function(options: FunctionOptions) -> Environment:
    """Raises ValueError when there is no such function."""
    return FunctionEnvironment(load_by_path(options.function), options.arguments)


def custom(options: CustomOptions) -> Environment:
    """Raises ValueError when there is no such class, or what its constructor raises."""
    return load_by_path(options.target)(**options.arguments)


class FunctionEnvironment:
    """``function(turn, **arguments)``, plain or async, gives a number, named numbers or a ``Feedback``."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self._function, self._arguments = function, dict(arguments)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Raises TypeError when the function returns something else."""
        return [await self._judge(turn) for turn in turns]

    async def _judge(self, turn: Turn) -> Feedback:
        answer = self._function(turn, **self._arguments)
        if inspect.isawaitable(answer):
            answer = await answer
        if isinstance(answer, Feedback):
            return answer
        if isinstance(answer, Mapping):
            return Feedback({str(name): float(value) for name, value in answer.items()})
        if isinstance(answer, int | float):
            return Feedback({"reward": float(answer)})
        raise TypeError(
            f"{self._function.__name__} returned {type(answer).__name__}, not a number, mapping or Feedback"
        )
