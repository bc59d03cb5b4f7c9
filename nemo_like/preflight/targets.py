"""Checks the user's own functions and classes that a configuration names.

Do they exist, and can they be called with what they will get? A child process imports them, since their
modules may do anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import Enum
from typing import Any

from nemo_like.algorithms.loss_kind import loss_kind_of
from nemo_like.algorithms.options import ESTIMATOR_KINDS, FILTER_KINDS, LOSS_KINDS
from nemo_like.batch.columns import ColumnError, Declaration, declared_by
from nemo_like.batch.tags import tags_read_by
from nemo_like.config.import_path import load_by_path
from nemo_like.configuration import Config
from nemo_like.environments.nemo_rl_environment import load_environment
from nemo_like.environments.registry import kind_of, options_of
from nemo_like.environments.verl_signature import names_of_verl
from nemo_like.plan.roles import worker_groups
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.options import BACKEND_KINDS
from nemo_like.rollout.tasks import used_environments

# The types of values that a parameter of each annotated type may get.
_PLAIN_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
}


class TargetKind(Enum):
    """What a target is, and so how it is called. The configuration gives only its arguments by name."""

    reward_function = 1  # (turn, **arguments)
    advantage_estimator = 2  # (inputs, cfg, **arguments)
    environment = 3  # (**arguments), which returns an object with the method step
    loss = 4  # (tokens, cfg, **arguments)
    sample_filter = 5  # (samples, cfg)
    training_backend = 6  # (cfg, objective, coordinates)

    @property
    def positional(self) -> tuple[str, ...]:
        """The names of the arguments that it gets by position."""
        return {
            TargetKind.reward_function: ("turn",),
            TargetKind.environment: (),
            TargetKind.loss: ("tokens", "cfg"),
            TargetKind.advantage_estimator: ("inputs", "cfg"),
            TargetKind.sample_filter: ("samples", "cfg"),
            TargetKind.training_backend: ("cfg", "objective", "coordinates"),
        }[self]


@dataclass(frozen=True, slots=True)
class Target:
    """A user's own function or class.

    ``key`` is the full configuration key that names ``path``. ``part`` is the part of the run for which the
    target declares columns, such as ``env.math``.
    """

    key: str
    path: str  # package.module:name
    kind: TargetKind
    arguments: dict[str, Any]
    part: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """The result of inspecting a target: its problem, or its columns when ``problem`` is None."""

    problem: str | None
    columns: Declaration | None = None


def targets_of(cfg: Config) -> Iterator[Target]:
    """Yield every function and class of the user's own that a run imports.

    Also yields shipped functions with arguments in the configuration, and a loss for which a teacher scores.
    """
    for name, env in used_environments(cfg).items():
        if (own := kind_of(env).own_code) is not None:
            options = options_of(env)
            kind = TargetKind.environment if own.makes_environment else TargetKind.reward_function
            path, key = getattr(options, own.option), f"env.{name}.options.{own.option}"
            yield Target(key, path, kind, options.arguments, f"env.{name}")
    adv, loss = cfg.grpo.adv_estimator, cfg.loss_fn
    if ESTIMATOR_KINDS.is_own(adv.name) or adv.arguments:
        path, kind = ESTIMATOR_KINDS.load(adv.name).function, TargetKind.advantage_estimator
        yield Target("grpo.adv_estimator.name", path, kind, adv.arguments, "grpo.adv_estimator")
    for index, name in enumerate(cfg.grpo.sample_filters):
        if FILTER_KINDS.is_own(name):
            path, key = FILTER_KINDS.load(name).function, f"grpo.sample_filters[{index}]"
            yield Target(key, path, TargetKind.sample_filter, {}, "grpo")
    of_loss = loss_kind_of(loss)
    if LOSS_KINDS.is_own(loss.kind) or cfg.teacher is not None:
        arguments = dict(of_loss.own_keys(loss))
        yield Target("loss_fn.kind", of_loss.function, TargetKind.loss, arguments, "loss_fn")
    for role, group in worker_groups(cfg).items():
        if BACKEND_KINDS.is_own(group.backend):
            path, key = backend_kind_of(group).backend, f"{role.group}.backend"
            yield Target(key, path, TargetKind.training_backend, {}, role.group)


def inspected(target: Target) -> Inspected:
    """Import a target without calling it, and return its problem or the columns that it declares."""
    if problem := problem_of(target):
        return Inspected(problem)
    try:
        found = _loaded(target)
        columns, tags = declared_by(target.part, found, target.arguments), tags_read_by(found)
    except (ColumnError, ValueError) as error:
        return Inspected(str(error))
    if tags and target.kind not in (TargetKind.advantage_estimator, TargetKind.sample_filter):
        return Inspected("is marked with @reads_tags, and only an estimator or a filter gets tags")
    is_environment = target.kind in (TargetKind.environment, TargetKind.reward_function)
    if columns.reads and target.kind is not TargetKind.loss:
        return Inspected("is marked with @reads, and only a loss gets columns")
    if columns.writes and not is_environment:
        return Inspected("is marked with @writes, and only an environment brings columns")
    return Inspected(None, columns)


def _loaded(target: Target) -> Any:
    is_environment = target.kind is TargetKind.environment
    return load_environment(target.path) if is_environment else load_by_path(target.path)


def problem_of(target: Target) -> str | None:
    """Import a target without calling it, and return what is wrong with it; None when nothing is found."""
    try:
        found = _loaded(target)
    except Exception as error:
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return f"cannot be imported: {reason}"
    if not callable(found):
        return f"is {type(found).__name__} and cannot be called"
    if target.kind is TargetKind.environment and inspect.isclass(found) and not hasattr(found, "step"):
        return "is a class without the method step(turns) of an environment"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # written in C: it does not say what it takes
    of_verl = names_of_verl(found) if target.kind is TargetKind.reward_function else ()
    positional, by_name = (() if of_verl else target.kind.positional), dict.fromkeys(of_verl)
    try:
        signature.bind(*positional, **by_name, **target.arguments)
    except TypeError as error:
        unknown = [name for name in target.arguments if name not in signature.parameters]
        close = get_close_matches(unknown[0], signature.parameters, n=1, cutoff=0.6) if unknown else []
        meant = f"; did you mean {close[0]}?" if close else ""
        given = ", ".join(
            [*(of_verl or positional), *(f"{key}={value!r}" for key, value in target.arguments.items())]
        )
        # Users of TRL, and of a notebook, write parameters by name.
        of_turn = target.kind is TargetKind.reward_function and not meant
        fields = "; turn.prompt, turn.response, turn.answer and turn.data are the sample's" if of_turn else ""
        reason = f"does not take what it would be given, ({given}): {error}"
        return f"{reason}; its signature is {signature}{meant}{fields}"
    return _wrong_type(signature, target.arguments)


def _wrong_type(signature: inspect.Signature, arguments: Mapping[str, Any]) -> str | None:
    """Return what is wrong with an argument whose parameter is annotated with a plain type; None if fine."""
    for name, value in arguments.items():
        parameter = signature.parameters.get(name)
        annotation = None if parameter is None else parameter.annotation
        shown = getattr(
            annotation, "__name__", str(annotation)
        )  # a string where annotations are not evaluated
        wanted = _PLAIN_TYPES.get(shown)
        if wanted is None:
            continue
        is_bool = isinstance(value, bool)
        if not isinstance(value, wanted) or (is_bool and bool not in wanted):
            return f"takes {name} as {shown}, and would be given {value!r}"
    return None
