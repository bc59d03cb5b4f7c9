"""Reward functions with verl's signature, which the kind ``function`` calls as verl does.

    compute_score(data_source, solution_str, ground_truth, extra_info, **arguments)
        returns a number, or named values
    compute_score(data_sources, solution_strs, ground_truths, extra_infos, **arguments)
        returns a list of them

A function is verl's when it has a parameter ``solution_str`` or ``solution_strs``.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_like.environments.feedback import as_number
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.per_turn import raised
from nemo_like.environments.verl_signature import OF_ONE, names_of_verl

_SCORE = "score"  # the reward among the named values that a function returns


class VerlReward:
    """Calls a function of verl for each turn, or, if it takes lists, for all turns of a call at once."""

    columns_written = ()

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        """Call ``function`` with ``arguments`` beside what verl gives it."""
        self._function, self._arguments = function, arguments
        self._names = names_of_verl(function)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order; a failed one where a function of one turn raises.

        Raises what a function of lists raises, and ValueError when it returns a list of another length.
        """
        if self._names == OF_ONE:
            return await asyncio.gather(*map(self._judged, turns))
        columns = zip(*map(_values, turns), strict=True)
        scores = await self._called([list(column) for column in columns])
        if len(scores) != len(turns):
            raise ValueError(f"the reward gave {len(scores)} scores for {len(turns)} responses")
        return [_feedback(score) for score in scores]

    async def _judged(self, turn: Turn) -> Feedback:
        try:
            return _feedback(await self._called(_values(turn)))
        except Exception as error:
            traceback.print_exc()
            return raised(error)

    async def _called(self, values: Sequence[Any]) -> Any:
        answer = self._function(**dict(zip(self._names, values, strict=True)), **self._arguments)
        return await answer if inspect.isawaitable(answer) else answer


def _values(turn: Turn) -> tuple[Any, ...]:
    """Return what verl calls a function with, of one turn.

    ``solution_str`` has all turns of a conversation with their observations. ``extra_info`` is the record's,
    with ``num_turns``, which counts both sides. Raises ValueError when the record names no data source.
    """
    if "data_source" not in turn.data:
        raise ValueError(
            "the record has no field data_source, by which a reward of verl chooses; add it to the data"
        )
    judged = turn.data.get("reward_model")
    truth = judged.get("ground_truth") if isinstance(judged, Mapping) else None
    said = "".join(f"{each.response}{each.observation}" for each in turn.history) + turn.response
    extra_info = {**(turn.data.get("extra_info") or {}), "num_turns": 2 * (len(turn.history) + 1)}
    return turn.data["data_source"], said, turn.answer if truth is None else truth, extra_info


def _feedback(score: Any) -> Feedback:
    """Return a function's result as feedback: a number, or named values, of which ``score`` is the reward and
    the other numbers are metrics. Raises TypeError for anything else."""
    if isinstance(score, Mapping):
        if _SCORE not in score:
            raise TypeError(f"the reward returned {', '.join(map(repr, score))} without 'score'")
        metrics = {name: as_number(value) for name, value in score.items() if name != _SCORE}
        given = {name: value for name, value in metrics.items() if value is not None}
        return Feedback({"reward": score[_SCORE]}, metrics=given)
    if (number := as_number(score)) is None:
        raise TypeError(f"the reward returned {type(score).__name__}, not a number or a mapping with 'score'")
    return Feedback({"reward": number})
