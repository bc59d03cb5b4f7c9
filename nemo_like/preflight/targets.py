"""Checks the user's own functions and classes that a configuration names: are they there, and do they take
what they will be given? A child process imports them, since nobody knows what their modules do."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from nemo_like.batch.columns import ColumnError, Declaration, declared_by
from nemo_like.config.derived import is_own_loss
from nemo_like.config.environment_options import options_of
from nemo_like.config.import_path import load_by_path
from nemo_like.config.schema import Config, EnvironmentKind
from nemo_like.config.tasks import used_environments


class TargetKind(Enum):
    """What a target is and how it is called; the configuration gives only its arguments by name."""

    reward_function = 1  # (turn, **arguments)
    advantage_estimator = 2  # (inputs)
    environment = 3  # (**arguments), which returns an object with the method step
    loss = 4  # (tokens, cfg)

    @property
    def num_positional(self) -> int:
        return {TargetKind.environment: 0, TargetKind.loss: 2}.get(self, 1)


@dataclass(frozen=True, slots=True)
class Target:
    """A user's own function or class.

    ``key`` is the full configuration key that names ``path``. ``part`` is the part of the run in whose name
    the target declares columns, such as ``env.math``.
    """

    key: str
    path: str  # package.module:name
    kind: TargetKind
    arguments: dict[str, Any]
    part: str


@dataclass(frozen=True, slots=True)
class Inspected:
    """What looking at a target showed: what is wrong with it, or, when ``problem`` is None, its columns."""

    problem: str | None
    columns: Declaration | None = None


def targets_of(cfg: Config) -> Iterator[Target]:
    """Yield every function and class of the user's own that a run with this configuration imports."""
    for name, env in used_environments(cfg).items():
        prefix = f"env.{name}.options"
        if env.kind is EnvironmentKind.function:
            options = options_of(env)
            kind = TargetKind.reward_function
            yield Target(f"{prefix}.function", options.function, kind, options.arguments, f"env.{name}")
        elif env.kind is EnvironmentKind.custom:
            options = options_of(env)
            kind = TargetKind.environment
            yield Target(f"{prefix}.target", options.target, kind, options.arguments, f"env.{name}")
    if ":" in (estimator := cfg.grpo.adv_estimator.name):
        kind = TargetKind.advantage_estimator
        yield Target("grpo.adv_estimator.name", estimator, kind, {}, "grpo.adv_estimator")
    if is_own_loss(cfg.loss_fn):
        yield Target("loss_fn.kind", cfg.loss_fn.kind, TargetKind.loss, {}, "loss_fn")


def inspected(target: Target) -> Inspected:
    """Import a target, and return what is wrong with it or which columns it declares; do not call it."""
    if problem := problem_of(target):
        return Inspected(problem)
    try:
        columns = declared_by(target.part, load_by_path(target.path))
    except ColumnError as error:
        return Inspected(str(error))
    is_environment = target.kind in (TargetKind.environment, TargetKind.reward_function)
    if columns.reads and target.kind is not TargetKind.loss:
        return Inspected("is marked with @reads, and only a loss gets columns")
    if columns.writes and not is_environment:
        return Inspected("is marked with @writes, and only an environment brings columns")
    return Inspected(None, columns)


def problem_of(target: Target) -> str | None:
    """Import a target, and return what is wrong with it; None when nothing shows. Do not call it."""
    try:
        found = load_by_path(target.path)
    except Exception as error:
        told = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return f"cannot be imported: {told}"
    if not callable(found):
        return f"is {type(found).__name__} and cannot be called"
    if target.kind is TargetKind.environment and inspect.isclass(found) and not hasattr(found, "step"):
        return "is a class without the method step(turns) of an environment"
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return None  # written in C: it does not say what it takes
    try:
        signature.bind(*[None] * target.kind.num_positional, **target.arguments)
    except TypeError as error:
        return f"does not take what it would be given: {error}; its signature is {signature}"
    return None
