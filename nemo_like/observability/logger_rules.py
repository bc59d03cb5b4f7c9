"""Checks the keys of the loggers, so that no logger refuses them after the run has begun."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.kind_options import kind_option_problems
from nemo_like.config.problems import Problem
from nemo_like.observability.loggers import chosen_loggers, own_key
from nemo_like.observability.options import LOGGER_KINDS, LoggerConfig
from nemo_like.policy.options import Device


def step_problems(logger: LoggerConfig, num_steps: int, device: Device) -> Iterator[Problem]:
    """Yield a problem for every key that names a step which a run of ``num_steps`` steps does not have.

    NVTX ranges, which do not exist on CPUs, are checked too.
    """
    asked = {"logger.trace_steps": logger.trace_steps, "logger.profile.steps": logger.profile.steps}
    for key, steps in asked.items():
        if num_steps >= 1 and any(not 1 <= step <= num_steps for step in steps):
            yield Problem(
                key=f"{key}={steps}",
                rule=f"must name steps from 1 to grpo.max_num_steps={num_steps}",
                remedy="the third step is past what only first steps do",
            )
    if logger.nvtx_ranges and device is Device.cpu:
        yield Problem(
            key="logger.nvtx_ranges=true",
            rule="needs policy.device=cuda",
            remedy="on CPU use logger.trace_steps or logger.profile",
        )


def logger_problems(logger: LoggerConfig) -> Iterator[Problem]:
    """Yield every problem with the loggers' keys, packages and credentials."""
    if wrong := [*_own_problems(logger)]:
        yield from wrong
        return
    for one in chosen_loggers(logger):
        if one.kind.problems is not None:
            yield from one.kind.problems(one.key, one.options)


def logger_machine_problems(logger: LoggerConfig) -> Iterator[Problem]:
    """Yield every reason why this machine cannot use the loggers, such as a server that does not answer."""
    if any(_own_problems(logger)):
        return
    for one in chosen_loggers(logger):
        if one.kind.machine_problems is not None:
            yield from one.kind.machine_problems(one.key, one.options)


def _own_problems(logger: LoggerConfig) -> Iterator[Problem]:
    """Yield the problems of the kinds and the options of the user's own loggers."""
    for name, own in logger.own.items():
        key = f"logger.own.{name}.kind={own.kind}"
        if not LOGGER_KINDS.is_own(own.kind):
            rule = f"is a shipped logger, whose keys are those of logger.{own.kind}"
            yield Problem(key=key, rule=rule, remedy="leave it out here, and set them")
        else:
            yield from kind_option_problems(
                own_key(name), own.options, LOGGER_KINDS.load(own.kind).options, key
            )
