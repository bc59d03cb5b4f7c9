"""Calls a program's reward function once before a run, in a child process, as the run will call it."""

from __future__ import annotations

import asyncio

from nemo_like.api.base_configuration import REWARD_ENVIRONMENT
from nemo_like.child_process.parent_side import ChildFailed
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.data.options import DatasetConfig
from nemo_like.environments.options import EnvConfig
from nemo_like.preflight.child import ChildCall

# Time for the child process's imports on a busy machine.
_START_TIME_S = 60.0


def check_first_reward(cfg: Config) -> None:
    """Raise ConfigError unless the reward function judges the first row, with the row's answer as the
    response.

    The height of the reward does not matter. Does nothing with check_at_start=false.
    """
    env = cfg.env[REWARD_ENVIRONMENT]
    if not env.check_at_start:
        return
    timeout_s = env.timeout_s + _START_TIME_S
    with ChildCall(first_reward_problem, cfg.data.train[0], env, timeout_s=timeout_s) as child:
        try:
            reason = child.result()
        except ChildFailed as error:
            reason = str(error)
    if reason is not None:
        problem = Problem(
            key="reward",
            rule=f"was asked about the first row, with its answer as the response, and gave none: {reason}",
            remedy=f"correct it; overrides=['env.{REWARD_ENVIRONMENT}.check_at_start=false'] starts without "
            "asking",
        )
        raise ConfigError([problem])


def first_reward_problem(source: DatasetConfig, env: EnvConfig) -> str | None:
    """Return why the reward function cannot judge the first row of a source; None when it can.

    Runs in a child process.
    """
    from nemo_like.data.datasets import build_dataset
    from nemo_like.environments.environment_data import EnvironmentPrompts
    from nemo_like.environments.feedback import checked
    from nemo_like.environments.interface import first_question
    from nemo_like.environments.own_reward import error_with_line
    from nemo_like.environments.registry import build_environment, written_columns

    example = build_dataset(source, "train", EnvironmentPrompts({source.env: env}))[0]
    environment = build_environment(env)
    try:
        answers = asyncio.run(environment.step([first_question(example, max_turns=env.max_turns)]))
    except Exception as error:
        return error_with_line(error)
    if len(answers) != 1:
        return f"it gave {len(answers)} answers to 1 response"
    failure = checked(answers[0], written_columns(environment)).failure
    return None if failure is None else failure.reason
