"""Looks up an environment's kind and options, and builds the environment; its module is loaded only then."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from nemo_like.batch.columns import Column, declared_by
from nemo_like.config import fields
from nemo_like.config.import_path import load_by_path
from nemo_like.environments.interface import Environment
from nemo_like.environments.kind import Kind, RecordCheck
from nemo_like.environments.options import ENVIRONMENT_KINDS, EnvConfig
from nemo_like.environments.record_needs import needs_nothing
from nemo_like.environments.shared_options import ModelOptions
from nemo_like.policy.options import Device


def kind_of(env: EnvConfig) -> Kind:
    """Return the description of an environment's kind."""
    kind: Kind = ENVIRONMENT_KINDS.load(env.kind)
    return kind


def options_of(env: EnvConfig) -> Any:
    """Return an environment's options as an instance of its kind's options class."""
    return fields.typed(env.options, kind_of(env).options)


def record_check_of(env: EnvConfig) -> RecordCheck:
    """Return a function that raises ValueError for a prompt that this environment could not judge."""
    path = kind_of(env).record_check
    check: RecordCheck = needs_nothing if path is None else load_by_path(path)(options_of(env))
    return check


def build_environment(cfg: EnvConfig) -> Environment:
    """Build the environment of ``cfg.kind``; raise the errors of its constructor."""
    environment: Environment = load_by_path(kind_of(cfg).judge)(options_of(cfg))
    return environment


def written_columns(environment: Environment) -> tuple[Column, ...]:
    """Return the columns that an environment's feedback may bring.

    Raises ColumnError when they are not declared with ``batch.columns.writes``.
    """
    return declared_by(type(environment).__name__, environment).writes


def component_weights(env: EnvConfig) -> dict[str, float]:
    """Return the weights of a weighted sum's components by name; {} for other kinds, and when the option is
    no mapping."""
    option = kind_of(env).components
    components = env.options.get(option) if option is not None else None
    if not isinstance(components, Mapping):
        return {}
    return {str(name): weight for name, weight in components.items()}


def last_judge(env: EnvConfig) -> str | None:
    """Return the name of the environment that judges the last response; None for a kind that does so
    itself."""
    option = kind_of(env).last_judge
    return None if option is None else str(env.options.get(option))


def call_pattern(env: EnvConfig) -> re.Pattern[str] | None:
    """Return what finds the tool calls in a response; None where responses call no tools in their text."""
    option = kind_of(env).call_pattern
    return None if option is None else re.compile(str(env.options.get(option)), re.DOTALL)


def has_tools(env: EnvConfig) -> bool:
    """Return whether responses may call tools, by themselves or for an agent."""
    return kind_of(env).call_pattern is not None or kind_of(env).calls_policy


def needs_gpu(env: EnvConfig) -> bool:
    """Return whether each actor of an environment has a GPU to itself."""
    return kind_of(env).loads_model and env.options.get("device") == Device.cuda.value


def reward_model(env: EnvConfig) -> ModelOptions | None:
    """Return the options of an environment that loads a model; None for others."""
    options = options_of(env) if kind_of(env).loads_model else None
    assert options is None or isinstance(options, ModelOptions)
    return options
