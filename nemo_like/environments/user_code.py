"""Environments from users' own code, which the configuration names by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from nemo_like.batch.columns import declared_by, writes
from nemo_like.config.import_path import load_by_path
from nemo_like.environments.feedback import as_number
from nemo_like.environments.interface import Environment, Feedback, Turn
from nemo_like.environments.kinds.custom import CustomOptions
from nemo_like.environments.kinds.function import FunctionOptions
from nemo_like.environments.nemo_rl_environment import NemoRlEnvironment, is_of_nemo_rl, load_environment
from nemo_like.environments.per_turn import PerTurnEnvironment
from nemo_like.environments.verl_reward import VerlReward
from nemo_like.environments.verl_signature import names_of_verl


def function(options: FunctionOptions) -> Environment:
    """Make an environment that calls ``function(turn, **arguments)`` for each turn.

    The function may be plain or async; ``feedback_of`` lists what it may return. One with verl's signature is
    called as verl does. Raises ValueError when there is no such function.
    """
    judge = load_by_path(options.function)
    if names_of_verl(judge):
        return VerlReward(judge, options.arguments)
    columns = declared_by(options.function, judge).writes
    return PerTurnEnvironment(partial(_judge, judge, options.arguments), columns)


def custom(options: CustomOptions) -> Environment:
    """Make the environment that ``options.target``, a class or function, returns for its arguments.

    An environment of NeMo-RL is asked as there. Raises ValueError when there is no such target, and the
    errors of the target.
    """
    target = load_environment(options.target)
    environment = target(**options.arguments)
    if is_of_nemo_rl(environment):
        return NemoRlEnvironment(environment)
    columns = declared_by(options.target, target, options.arguments).writes
    if columns and not declared_by(options.target, environment).writes:  # a function that makes it has them
        return writes(*columns)(environment)
    return environment


async def _judge(judge: Callable[..., Any], arguments: Mapping[str, Any], turn: Turn) -> Feedback:
    """Call the function and turn its result into feedback. Raises TypeError for a result of another type."""
    answer = judge(turn, **arguments)
    return feedback_of(judge, await answer if inspect.isawaitable(answer) else answer)


def feedback_of(judge: Callable[..., Any], answer: object) -> Feedback:
    """Return a result of the function ``judge`` as feedback: a number, named numbers, a ``Feedback``, or None
    for a response that it does not judge.

    Raises TypeError for anything else.
    """
    if isinstance(answer, Feedback):
        return answer
    if isinstance(answer, Mapping):
        return Feedback(answer)
    if answer is None:
        return Feedback({"reward": None})
    if (number := as_number(answer)) is not None:
        return Feedback({"reward": number})
    name = getattr(judge, "__name__", type(judge).__name__)
    raise TypeError(f"{name} returned {type(answer).__name__}, not a number, mapping or Feedback")
