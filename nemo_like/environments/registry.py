"""Builds the environment of a kind; the kind's module is loaded only then."""

from __future__ import annotations

import importlib

from nemo_like.batch.columns import Column, declared_by
from nemo_like.environments.interface import Environment
from nemo_like.environments.kind_options import HUB_MODULES, options_of
from nemo_like.environments.options import EnvConfig, EnvironmentKind

_PACKAGE = "nemo_like.environments"

# "module:factory", called with the kind's options.
_FACTORIES = {
    EnvironmentKind.arithmetic: "text_match:arithmetic",
    EnvironmentKind.exact_match: "text_match:exact_match",
    EnvironmentKind.f1: "text_match:f1",
    EnvironmentKind.regex: "text_match:regex",
    EnvironmentKind.json_schema: "json_schema:json_schema",
    EnvironmentKind.math_verify: "verifiers:math_verify",
    EnvironmentKind.reasoning_gym: "verifiers:reasoning_gym",
    EnvironmentKind.function: "user_code:function",
    EnvironmentKind.custom: "user_code:custom",
    EnvironmentKind.code: "code:CodeEnvironment",
    EnvironmentKind.http: "remote:HttpEnvironment",
    EnvironmentKind.reward_model: "reward_model:RewardModelEnvironment",
    EnvironmentKind.judge: "judge:judge",
    EnvironmentKind.preference: "judge:preference",
    EnvironmentKind.calculator: "calculator:calculator",
    EnvironmentKind.sliding_puzzle: "sliding_puzzle:sliding_puzzle",
    EnvironmentKind.gymnasium: "hub:gymnasium",
    EnvironmentKind.textarena: "hub:textarena",
    EnvironmentKind.openenv: "hub:openenv",
    EnvironmentKind.verifiers: "hub:verifiers",
    EnvironmentKind.mcp: "mcp_tools:McpEnvironment",
    EnvironmentKind.agent: "agent:agent",
}

# Environments too simple to hang or crash, so that they need no process that can be replaced.
_HARMLESS = frozenset({EnvironmentKind.arithmetic, EnvironmentKind.sliding_puzzle})

_MAX_PROCESSES = 8
_MAX_HUB_PROCESSES = 2  # each loads a package
_START_TIMEOUT_S = 120.0
# Tens of GB of weights take minutes; a run's cluster.start_timeout_s may end the wait before.
_MODEL_START_TIMEOUT_S = 1200.0


def build_environment(cfg: EnvConfig) -> Environment:
    """Build the environment that ``cfg.kind`` names; raise what its constructor raises."""
    module, _, factory = _FACTORIES[cfg.kind].partition(":")
    return getattr(importlib.import_module(f"{_PACKAGE}.{module}"), factory)(options_of(cfg))


def written_columns(environment: Environment) -> tuple[Column, ...]:
    """Return the columns that an environment's feedback may bring.

    Raises ColumnError when it does not declare them as ``batch.columns.writes`` does.
    """
    return declared_by(type(environment).__name__, environment).writes


def max_processes(cfg: EnvConfig) -> int:
    """Return how many processes of one actor may run an environment side by side, when turns are asked about
    alone: one where each loads a model."""
    if cfg.kind is EnvironmentKind.reward_model:
        return 1
    return _MAX_HUB_PROCESSES if cfg.kind in HUB_MODULES else _MAX_PROCESSES


def keeps_episodes(cfg: EnvConfig) -> bool:
    """Return whether the environment's process has a conversation's episode, so that its next turn should
    come there: another process would have to play it again."""
    return cfg.kind in HUB_MODULES


def start_timeout_s(cfg: EnvConfig) -> float:
    """Return the deadline of building an environment in a new process: of imports, and of what it loads."""
    return _MODEL_START_TIMEOUT_S if cfg.kind is EnvironmentKind.reward_model else _START_TIMEOUT_S


def is_harmless(cfg: EnvConfig) -> bool:
    """Return whether an environment's code may run in the server's own process."""
    return cfg.kind in _HARMLESS
