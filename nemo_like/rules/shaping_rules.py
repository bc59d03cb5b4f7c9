"""Checks the shaping of rewards by the lengths of responses."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.registry import kind_of
from nemo_like.rollout.tasks import response_limit, task_with_limit_of_a_turn, training_tasks


def shaping_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of the shaping of rewards with the limits on responses."""
    shaping = cfg.grpo.reward_shaping
    if not shaping.enabled:
        return
    length, buffer = shaping.max_response_length, shaping.overlong_buffer_length
    if buffer is not None and (length is None or length >= 1):
        yield from _buffer(cfg, buffer)
        if length is not None and (task := task_with_limit_of_a_turn(cfg, length)) is not None:
            yield Problem(
                key=f"grpo.reward_shaping.max_response_length={length}",
                rule=f"is max_new_tokens, the limit of one turn, and the penalty counts all turns: samples "
                f"of env.{task} may have {response_limit(cfg, task)} tokens",
                remedy="null takes what each task's samples may have",
            )
    if buffer is None and shaping.stop_properly_penalty_coef is None:
        yield Problem(
            key="grpo.reward_shaping.enabled=true",
            rule="shapes nothing with overlong_buffer_length=null and stop_properly_penalty_coef=null",
            remedy="set one of the two, or enabled=false",
        )


def _buffer(cfg: Config, buffer: int) -> Iterator[Problem]:
    """Yield a problem when the buffer of the overlong penalty is longer than the limit in which it lies."""
    length = cfg.grpo.reward_shaping.max_response_length
    if length is not None:
        limits = {f"max_response_length={length}": length}
    else:
        limits = {
            f"the {limit} tokens that a sample of env.{task} may have": limit
            for task in training_tasks(cfg)
            if task in cfg.env and not kind_of(cfg.env[task]).calls_policy
            for limit in [response_limit(cfg, task)]
        }
    for what, limit in limits.items():
        if not 1 <= buffer <= limit:
            yield Problem(
                key=f"grpo.reward_shaping.overlong_buffer_length={buffer}",
                rule=f"must be at least 1 and at most {what}",
                remedy=f"a quarter of it is usual: {max(1, limit // 4)}",
            )
            return
