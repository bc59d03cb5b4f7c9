"""A reward function that a program hands over as an object, such as a function from a notebook's cell.

    program ── pickled_reward ──▶ a file ── saved_reward ──▶ an environment, in its own process

No other process could import such a function, so it is sent by value. Its parameters' names decide its
arguments: ``turn`` is the whole ``Turn``; ``prompt``, ``response``, ``answer`` and ``is_truncated`` are its
fields; all other names are fields of the record. A function with a parameter ``completions`` follows TRL:
it is called with lists, and returns a list. Several functions are sent together, as ``WeightedRewards``.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from nemo_like.batch.columns import Column, declared_by, writes_by_arguments
from nemo_like.data.messages import as_record, is_begun, with_response
from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Environment, FailureKind, Feedback, Turn
from nemo_like.environments.user_code import feedback_of
from nemo_like.environments.weighted_feedback import weighted_feedback

# Names of parameters that are no fields of a record.
OF_A_TURN = ("turn", "prompt", "response", "answer", "is_truncated")
OF_A_BATCH = ("prompts", "completions", "answer")
_COMPLETIONS = "completions"


class UnfitReward(ValueError):
    """A reward function cannot be called, or cannot leave its process; the message says why."""


@dataclass(frozen=True, slots=True)
class WeightedRewards:
    """Several reward functions; the reward is the sum of theirs, each times its weight."""

    functions: Mapping[str, Callable[..., Any]]  # by the names of the reward's components
    weights: Mapping[str, float]  # by the same names, in the same order


Reward = Callable[..., Any] | WeightedRewards


@dataclass(frozen=True, slots=True)
class RewardParameters:
    """The names of a reward function's arguments."""

    needed: tuple[str, ...]
    optional: tuple[str, ...]  # they have defaults
    takes_rest: bool  # **kwargs: also gets every other field of the record

    @classmethod
    def of(cls, reward: Callable[..., Any]) -> RewardParameters:
        """Read the names from the function's signature. Raises UnfitReward when that is not possible."""
        if not callable(reward):
            raise UnfitReward(f"is {type(reward).__name__} and cannot be called; give a function")
        try:
            parameters = inspect.signature(reward).parameters.values()
        except (TypeError, ValueError) as error:
            raise UnfitReward(f"does not say what it takes ({error}); wrap it in a function") from error
        by_position = [one.name for one in parameters if one.kind is one.POSITIONAL_ONLY]
        if by_position:
            raise UnfitReward(
                f"takes {', '.join(by_position)} by position, and is called by names; leave out the slash"
            )
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        return cls(
            tuple(one.name for one in named if one.default is one.empty),
            tuple(one.name for one in named if one.default is not one.empty),
            any(one.kind is one.VAR_KEYWORD for one in parameters),
        )

    @property
    def are_lists(self) -> bool:
        """Whether the function judges a list of responses at once, as TRL's functions do."""
        return _COMPLETIONS in (*self.needed, *self.optional)

    def missing(self, fields: Sequence[str]) -> list[str]:
        """Return the parameters of the function that neither a turn nor a record with ``fields`` fills."""
        there = {*(OF_A_BATCH if self.are_lists else OF_A_TURN), *fields}
        return [name for name in self.needed if name not in there]

    def chosen(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that the function takes. Raises UnfitReward when one is missing."""
        if absent := [name for name in self.needed if name not in values]:
            raise UnfitReward(
                f"takes {', '.join(map(repr, absent))}, and there are {', '.join(map(repr, values))}"
            )
        names = (*self.needed, *self.optional)
        return {name: value for name, value in values.items() if self.takes_rest or name in names}


def pickled_reward(reward: Reward) -> bytes:
    """Return reward functions, with everything that they refer to, as the contents of a file.

    Functions and classes of the calling program itself are stored by value; modules by name, with the folders
    in which this process finds them. Raises UnfitReward when a function refers to something that cannot be
    sent.
    """
    for function in _functions(reward):
        RewardParameters.of(function)
    try:
        contents = cloudpickle.dumps(reward)
    except Exception as error:
        raise UnfitReward(
            f"cannot be sent to other processes: {type(error).__name__}: {error}; make such objects inside "
            "the function, on its first call"
        ) from error
    folders = [path or os.getcwd() for path in sys.path]
    return pickle.dumps((folders, contents))


def loaded_reward(path: str) -> Reward:
    """Return what a file of ``pickled_reward`` holds; raise the errors of unpickling it."""
    folders, contents = pickle.loads(Path(path).read_bytes())
    sys.path.extend(folder for folder in folders if folder not in sys.path)
    reward = pickle.loads(contents)
    assert isinstance(reward, WeightedRewards) or callable(reward)
    return reward


def _functions(reward: Reward) -> Sequence[Callable[..., Any]]:
    return [*reward.functions.values()] if isinstance(reward, WeightedRewards) else [reward]


def _columns(path: str) -> tuple[Column, ...]:
    reward = loaded_reward(path)
    return tuple(column for one in _functions(reward) for column in declared_by(path, one).writes)


@writes_by_arguments(_columns)
def saved_reward(path: str) -> Environment:
    """Make an environment that calls what the file ``path`` holds, written by ``pickled_reward``."""
    reward = loaded_reward(path)
    if not isinstance(reward, WeightedRewards):
        return _OwnReward(reward, path)
    environments = {name: _OwnReward(function, path) for name, function in reward.functions.items()}
    return _SumOfRewards(environments, reward.weights)


class _SumOfRewards:
    """Calls several functions for each turn, and adds up their rewards with their weights."""

    def __init__(self, environments: Mapping[str, _OwnReward], weights: Mapping[str, float]) -> None:
        self._environments, self._weights = environments, weights
        self.columns_written = tuple(
            column for one in environments.values() for column in one.columns_written
        )

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order; calls of async functions interleave.

        Raises what a function of lists raises, as ``_OwnReward`` does, and ValueError when one returns a list
        of another length.
        """
        asked = [self._checked(name, environment, turns) for name, environment in self._environments.items()]
        answers = await asyncio.gather(*asked)
        return [
            weighted_feedback(turn, self._weights, given)
            for turn, *given in zip(turns, *answers, strict=True)
        ]

    async def _checked(self, name: str, environment: _OwnReward, turns: Sequence[Turn]) -> list[Feedback]:
        answers, columns = await environment.step(turns), environment.columns_written
        if len(answers) != len(turns):
            raise ValueError(f"{name} gave {len(answers)} rewards for {len(turns)} responses")
        return [
            checked(answer, columns, len(turn.response_ids), turn.number)
            for turn, answer in zip(turns, answers, strict=True)
        ]


class _OwnReward:
    """Calls a function for each turn, or, if it takes lists, for all turns of a call at once."""

    def __init__(self, reward: Callable[..., Any], path: str) -> None:
        self._reward, self._parameters = reward, RewardParameters.of(reward)
        self.columns_written = declared_by(path, reward).writes

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order; calls of an async function interleave.

        A function that raises fails its turn. A function of lists raises here: the server then asks about
        each turn alone and so finds the turn that raised.
        """
        if self._parameters.are_lists:
            return await self._judged_together(turns)
        return await asyncio.gather(*map(self._judged, turns))

    async def _judged(self, turn: Turn) -> Feedback:
        try:
            return feedback_of(self._reward, await self._called(_values(turn)))
        except Exception as error:
            traceback.print_exc()
            return Feedback.failed(FailureKind.raised, error_with_line(error))

    async def _judged_together(self, turns: Sequence[Turn]) -> list[Feedback]:
        answers = await self._called(_lists(turns))
        if hasattr(answers, "tolist"):  # an array or a tensor
            answers = answers.tolist()
        if not isinstance(answers, Sequence):
            raise TypeError(f"the reward returned {type(answers).__name__}, not a list of numbers")
        return [feedback_of(self._reward, answer) for answer in answers]

    async def _called(self, values: Mapping[str, Any]) -> Any:
        answer = self._reward(**self._parameters.chosen(values))
        return await answer if inspect.isawaitable(answer) else answer


def error_with_line(error: Exception) -> str:
    """Return a text with the error that a reward function raised, and the line of the function."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [index for index, frame in enumerate(frames) if frame.filename == __file__]
    called = frames[callers[-1] + 1 :] if callers else []
    place = f" (line {called[0].lineno}, in {called[0].name})" if called else ""
    return f"the reward raised {type(error).__name__}: {error}{place}"


def _values(turn: Turn) -> dict[str, Any]:
    """Return all possible arguments for one turn; a field of the record does not replace a field of the
    turn."""
    return {
        **turn.data,
        "turn": turn,
        "prompt": as_record(turn.prompt),
        "response": turn.response,
        "answer": turn.answer,
        "is_truncated": turn.is_truncated,
    }


def _lists(turns: Sequence[Turn]) -> dict[str, list[Any]]:
    """Return all possible arguments for several turns; a record without a field has None in its place.

    After a prompt of messages the completion is a list of one message, as in TRL; when the prompt ends in a
    message of the assistant, that message is part of the completion instead of the prompt.
    """
    fields = dict.fromkeys(name for turn in turns for name in turn.data)
    asked = [_prompt_and_completion(turn) for turn in turns]
    return {
        **{name: [turn.data.get(name) for turn in turns] for name in fields},
        "prompts": [prompt for prompt, _ in asked],
        "completions": [completion for _, completion in asked],
        "answer": [turn.answer for turn in turns],
    }


def _prompt_and_completion(turn: Turn) -> tuple[Any, Any]:
    prompt = turn.prompt
    if isinstance(prompt, str):
        return prompt, turn.response
    *_, completion = with_response(prompt, turn.response)
    return as_record(prompt[:-1] if is_begun(prompt) else prompt), [completion.as_mapping()]
