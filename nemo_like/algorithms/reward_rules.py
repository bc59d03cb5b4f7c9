"""Rules on ``grpo``: how rewards become advantages, and how long a run goes on."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.named_functions import FunctionRole, unknown_function
from nemo_like.algorithms.options import AdvantageEstimatorName, GRPOConfig
from nemo_like.config.problems import Problem

_ESTIMATORS = AdvantageEstimatorName.__members__


# The estimators that look at a sample without its group.
_WITHOUT_GROUPS = (AdvantageEstimatorName.reinforce_plus_plus.name, AdvantageEstimatorName.gae.name)


def reward_problems(grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield every problem for which rewards could not become advantages as configured."""
    for rule in (_estimator, _filters, _group_size, _leave_one_out, _scaling, _early_stop):
        yield from rule(grpo)


def _estimator(grpo: GRPOConfig) -> Iterator[Problem]:
    adv = grpo.adv_estimator
    if problem := unknown_function(FunctionRole.estimator, "grpo.adv_estimator.name", adv.name):
        yield problem
        return
    if adv.name != AdvantageEstimatorName.grpo.name and grpo.use_leave_one_out_baseline:
        yield Problem(
            key="grpo.use_leave_one_out_baseline=true",
            rule=f"belongs to the estimator grpo and would do nothing with {adv.name}",
            remedy="set it to false; the estimator rloo has this baseline",
        )
    if adv.name == AdvantageEstimatorName.gdpo.name:
        yield from _gdpo(grpo)
    elif adv.reward_weights and adv.name in _ESTIMATORS:
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={adv.reward_weights}",
            rule=f"would do nothing with the estimator {adv.name}, which sees the sum of the components",
            remedy="use grpo.adv_estimator.name=gdpo, or weigh the components in the environment",
        )


def _filters(grpo: GRPOConfig) -> Iterator[Problem]:
    names = grpo.sample_filters
    for place, name in enumerate(names):
        key = f"grpo.sample_filters[{place}]"
        if problem := unknown_function(FunctionRole.filter, key, name):
            yield problem
        elif name in names[:place]:
            yield Problem(key=f"{key}={name}", rule="stands there twice", remedy="leave one of them out")


def _gdpo(grpo: GRPOConfig) -> Iterator[Problem]:
    weights = grpo.adv_estimator.reward_weights
    if not any(weights.values()):
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={weights}",
            rule="must weigh at least one reward component with the estimator gdpo",
            remedy="for example ++grpo.adv_estimator.reward_weights.correct=1.0",
        )
    for stage in ("reward_scaling", "reward_shaping"):
        if getattr(grpo, stage).enabled:
            yield Problem(
                key=f"grpo.{stage}.enabled=true",
                rule="would do nothing with the estimator gdpo, which sees raw components, not their sum",
                remedy="switch it off, or let the environment give such a penalty as a component",
            )


def _group_size(grpo: GRPOConfig) -> Iterator[Problem]:
    size, name = grpo.num_generations_per_prompt, grpo.adv_estimator.name
    if size == 1 and (name not in _WITHOUT_GROUPS or grpo.use_dynamic_sampling):
        yield Problem(
            key=f"grpo.num_generations_per_prompt={size}",
            rule="must be at least 2",
            remedy="a response is judged against the others of its group; 8 or 16 are usual",
        )


def _scaling(grpo: GRPOConfig) -> Iterator[Problem]:
    scaling = grpo.reward_scaling
    for low, high in (("source_min", "source_max"), ("target_min", "target_max")):
        if scaling.enabled and not getattr(scaling, low) < getattr(scaling, high):
            yield Problem(
                key=f"grpo.reward_scaling.{high}={getattr(scaling, high):g}",
                rule=f"must be above {low}={getattr(scaling, low):g}",
                remedy="a reversed range would turn good answers into bad ones",
            )


def _leave_one_out(grpo: GRPOConfig) -> Iterator[Problem]:
    size = grpo.num_generations_per_prompt
    if size >= 1 and grpo.use_leave_one_out_baseline and grpo.normalize_rewards and size < 3:
        yield Problem(
            key=f"grpo.num_generations_per_prompt={size}",
            rule=(
                "must be at least 3 with use_leave_one_out_baseline=true and normalize_rewards=true, "
                "because the one other reward has no standard deviation"
            ),
            remedy="use a group of 3 or more, or set grpo.normalize_rewards=false",
        )


def _early_stop(grpo: GRPOConfig) -> Iterator[Problem]:
    if grpo.val_stop_threshold is not None and grpo.val_period == 0:
        yield Problem(
            key=f"grpo.val_stop_threshold={grpo.val_stop_threshold:g}",
            rule="stops nothing with grpo.val_period=0, which never validates between steps",
            remedy="set grpo.val_period, or grpo.val_stop_threshold=null",
        )
