"""Rules on rewards, from scaling and shaping to advantages."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.named_functions import FunctionRole, unknown_function
from nemo_like.algorithms.options import AdvantageEstimatorName
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.environments.options import EnvironmentKind
from nemo_like.rollout.response_limit import response_limit, task_with_limit_of_a_turn
from nemo_like.rollout.tasks import training_tasks

_ESTIMATORS = AdvantageEstimatorName.__members__
# The estimators that look at a sample without its group.
_WITHOUT_GROUPS = (AdvantageEstimatorName.reinforce_plus_plus.name, AdvantageEstimatorName.gae.name)


def reward_problems(cfg: Config) -> list[Problem]:
    """Return every problem for which rewards could not become advantages as configured."""
    return [
        problem
        for rule in (_estimator, _filters, _groups, _scaling, _shaping, _sampling)
        for problem in rule(cfg)
    ]


def _estimator(cfg: Config) -> Iterator[Problem]:
    adv = cfg.grpo.adv_estimator
    if problem := unknown_function(FunctionRole.estimator, "grpo.adv_estimator.name", adv.name):
        yield problem
        return
    if adv.name != AdvantageEstimatorName.grpo.name and cfg.grpo.use_leave_one_out_baseline:
        yield Problem(
            key="grpo.use_leave_one_out_baseline=true",
            rule=f"belongs to the estimator grpo and would do nothing with {adv.name}",
            remedy="set it to false; the estimator rloo has this baseline",
        )
    if adv.name == AdvantageEstimatorName.gdpo.name:
        yield from _gdpo(cfg)
    elif adv.reward_weights and adv.name in _ESTIMATORS:
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={adv.reward_weights}",
            rule=f"would do nothing with the estimator {adv.name}, which sees the sum of the components",
            remedy="use grpo.adv_estimator.name=gdpo, or weigh the components in the environment",
        )


def _filters(cfg: Config) -> Iterator[Problem]:
    names = cfg.grpo.sample_filters
    for place, name in enumerate(names):
        key = f"grpo.sample_filters[{place}]"
        if problem := unknown_function(FunctionRole.filter, key, name):
            yield problem
        elif name in names[:place]:
            yield Problem(key=f"{key}={name}", rule="stands there twice", remedy="leave one of them out")


def _gdpo(cfg: Config) -> Iterator[Problem]:
    weights = cfg.grpo.adv_estimator.reward_weights
    if not any(weights.values()):
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={weights}",
            rule="must weigh at least one reward component with the estimator gdpo",
            remedy="for example ++grpo.adv_estimator.reward_weights.correct=1.0",
        )
    for stage in ("reward_scaling", "reward_shaping"):
        if getattr(cfg.grpo, stage).enabled:
            yield Problem(
                key=f"grpo.{stage}.enabled=true",
                rule="would do nothing with the estimator gdpo, which sees raw components, not their sum",
                remedy="switch it off, or let the environment give such a penalty as a component",
            )


def _groups(cfg: Config) -> Iterator[Problem]:
    size, name = cfg.grpo.num_generations_per_prompt, cfg.grpo.adv_estimator.name
    if size == 1 and (name not in _WITHOUT_GROUPS or cfg.grpo.use_dynamic_sampling):
        yield Problem(
            key=f"grpo.num_generations_per_prompt={size}",
            rule="must be at least 2",
            remedy="a response is judged against the others of its group; 8 or 16 are usual",
        )


def _scaling(cfg: Config) -> Iterator[Problem]:
    scaling = cfg.grpo.reward_scaling
    for low, high in (("source_min", "source_max"), ("target_min", "target_max")):
        if scaling.enabled and not getattr(scaling, low) < getattr(scaling, high):
            yield Problem(
                key=f"grpo.reward_scaling.{high}={getattr(scaling, high):g}",
                rule=f"must be above {low}={getattr(scaling, low):g}",
                remedy="a reversed range would turn good answers into bad ones",
            )


def _shaping(cfg: Config) -> Iterator[Problem]:
    shaping = cfg.grpo.reward_shaping
    if not shaping.enabled:
        return
    length, buffer = shaping.max_response_length, shaping.overlong_buffer_length
    if length is not None and length < 1:
        yield Problem(
            key=f"grpo.reward_shaping.max_response_length={length}", rule="must be at least 1", remedy=""
        )
    elif buffer is not None:
        yield from _buffer(cfg, buffer)
        if length is not None and (task := task_with_limit_of_a_turn(cfg, length)) is not None:
            yield Problem(
                key=f"grpo.reward_shaping.max_response_length={length}",
                rule=f"is max_new_tokens, the limit of one turn, and the penalty counts all turns: samples "
                f"of env.{task} may have {response_limit(cfg, task)} tokens",
                remedy="null takes what each task's samples may have",
            )
    if not shaping.overlong_buffer_penalty >= 0:
        yield Problem(
            key=f"grpo.reward_shaping.overlong_buffer_penalty={shaping.overlong_buffer_penalty:g}",
            rule="must be at least 0",
            remedy="it is subtracted",
        )
    share = shaping.stop_properly_penalty_coef
    if share is not None and not 0 <= share <= 1:
        yield Problem(
            key=f"grpo.reward_shaping.stop_properly_penalty_coef={share:g}",
            rule="must be at least 0 and at most 1",
            remedy="it is the share of its reward that a truncated response keeps",
        )
    if buffer is None and share is None:
        yield Problem(
            key="grpo.reward_shaping.enabled=true",
            rule="shapes nothing with overlong_buffer_length=null and stop_properly_penalty_coef=null",
            remedy="set one of the two, or enabled=false",
        )


def _buffer(cfg: Config, buffer: int) -> Iterator[Problem]:
    """Yield a problem where the buffer of the overlong penalty is longer than what it is a part of."""
    length = cfg.grpo.reward_shaping.max_response_length
    if length is not None:
        limits = {f"max_response_length={length}": length}
    else:
        limits = {
            f"the {limit} tokens that a sample of env.{task} may have": limit
            for task in training_tasks(cfg)
            if task in cfg.env and cfg.env[task].kind is not EnvironmentKind.agent
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


def _sampling(cfg: Config) -> Iterator[Problem]:
    batches = cfg.grpo.dynamic_sampling_max_gen_batches
    if batches < 1:
        yield Problem(
            key=f"grpo.dynamic_sampling_max_gen_batches={batches}", rule="must be at least 1", remedy=""
        )
