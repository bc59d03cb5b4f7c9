from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from nemo_like.algorithms.reward_rules import reward_problems
from nemo_like.config.keys import beyond_limits
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.rules.shaping_rules import shaping_problems

Demo = Callable[..., Config]
ESTIMATOR = "grpo.adv_estimator.name"
WEIGHT = "++grpo.adv_estimator.reward_weights.correct=1.0"


def problems(cfg: Config) -> list[Problem]:
    return [*beyond_limits(cfg.grpo, "grpo."), *reward_problems(cfg.grpo), *shaping_problems(cfg)]


@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        (f"{ESTIMATOR}=rlo", r"name='rlo' must be one of gae, gdpo, grpo, .*; did you mean rloo\?"),
        (
            "grpo.sample_filters=[not_trunkated]",
            r"sample_filters\[0\]='not_trunkated' must be one of different_rewards, .*mean not_truncated\?",
        ),
    ],
)
def test_a_name_that_nobody_knows_is_told_with_those_that_there_are(
    demo: Demo, argument: str, problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        demo(argument)


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (f"{ESTIMATOR}=rloo",),
        (f"{ESTIMATOR}=reinforce_plus_plus", "grpo.num_generations_per_prompt=1"),
        (f"{ESTIMATOR}=gdpo", WEIGHT),
        (f"{ESTIMATOR}='nemo_like.algorithms.advantage_estimators.rloo:rloo'",),
        ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_min=-1.0"),
        ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=2"),
        ("grpo.use_dynamic_sampling=true", "grpo.overlong_filtering=true"),
        ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_component=format"),
        ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_num_prompts=256"),
        ("grpo.val_start_at=20",),
        ("grpo.advantage_clip_low=-5", "grpo.advantage_clip_high=0"),
        ("grpo.sample_filters=[not_truncated,'my_module:easy']",),
    ],
)
def test_what_can_run_has_no_problem(demo: Demo, arguments: tuple[str, ...]) -> None:
    assert problems(demo(*arguments)) == []


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            ("grpo.sample_filters=[not_truncated,not_truncated]",),
            r"sample_filters\[1\]=not_truncated stands there twice",
        ),
        (
            ("grpo.dynamic_sampling_component=format",),
            "grpo.dynamic_sampling_component=format has no effect with grpo.use_dynamic_sampling=false",
        ),
        (
            ("grpo.dynamic_sampling_num_prompts=96",),
            "grpo.dynamic_sampling_num_prompts=96 has no effect with grpo.use_dynamic_sampling=false",
        ),
        (
            ("grpo.use_dynamic_sampling=true", "grpo.dynamic_sampling_num_prompts=1"),
            "dynamic_sampling_num_prompts=1 must be at least grpo.num_prompts_per_step=",
        ),
        (
            ("grpo.val_start_at=20", "grpo.val_period=0"),
            "grpo.val_start_at=20 has no effect with grpo.val_period=0",
        ),
        (("grpo.advantage_clip_low=1",), "grpo.advantage_clip_low=1.0 must be at most 0; null does not clip"),
        (
            (f"{ESTIMATOR}=rloo", "grpo.use_leave_one_out_baseline=true"),
            "use_leave_one_out_baseline=true belongs to the estimator grpo",
        ),
        ((f"{ESTIMATOR}=gdpo",), "reward_weights={} must weigh at least one reward component"),
        (
            (f"{ESTIMATOR}=gdpo", WEIGHT, "grpo.reward_scaling.enabled=true"),
            "reward_scaling.enabled=true would do nothing with the estimator gdpo",
        ),
        ((WEIGHT,), "reward_weights=.* would do nothing with the estimator grpo"),
        (
            (
                f"{ESTIMATOR}=reinforce_plus_plus",
                "grpo.num_generations_per_prompt=1",
                "grpo.use_dynamic_sampling=true",
            ),
            "num_generations_per_prompt=1 must be at least 2",
        ),
        (
            ("grpo.reward_scaling.enabled=true", "grpo.reward_scaling.source_max=0.0"),
            "reward_scaling.source_max=0 must be above source_min=0",
        ),
        (("grpo.reward_shaping.enabled=true",), "reward_shaping.enabled=true shapes nothing"),
        (
            (
                "grpo.reward_shaping.enabled=true",
                "grpo.reward_shaping.max_response_length=4",
                "grpo.reward_shaping.overlong_buffer_length=9",
            ),
            "overlong_buffer_length=9 must be at least 1 and at most max_response_length=4",
        ),
        (
            ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.overlong_buffer_length=9"),
            "overlong_buffer_length=9 .* at most the 4 tokens that a sample of env.arithmetic may have",
        ),
        (
            ("grpo.reward_shaping.enabled=true", "grpo.reward_shaping.stop_properly_penalty_coef=1.5"),
            "stop_properly_penalty_coef=1.5 must be at least 0 and at most 1",
        ),
        (
            (
                "grpo.reward_shaping.enabled=true",
                "grpo.reward_shaping.overlong_buffer_length=2",
                "grpo.reward_shaping.overlong_buffer_penalty=-1.0",
            ),
            "overlong_buffer_penalty=-1.0 must be at least 0",
        ),
        (("grpo.dynamic_sampling_max_gen_batches=0",), "must be at least 1"),
    ],
)
def test_what_cannot_run_is_refused_with_the_reason(
    demo: Demo, arguments: tuple[str, ...], problem: str
) -> None:
    (found,) = problems(demo(*arguments))
    assert re.search(problem.replace("{}", r"\{\}").replace("?", r"\?"), str(found)), found
