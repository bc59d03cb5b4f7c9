"""Rules on ``grpo``: how rewards become advantages, and how long a run goes on."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.estimator_kind import estimator_kind_of
from nemo_like.algorithms.options import ESTIMATOR_KINDS, GRPOConfig
from nemo_like.config.problems import Problem


def reward_problems(grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield every problem with keys of ``grpo`` on rewards, advantages, filters and early stopping."""
    for rule in (
        _estimator,
        _clip,
        _filters,
        _group_size,
        _leave_one_out,
        _scaling,
        _dynamic_sampling,
        _first_validation,
        _early_stop,
    ):
        yield from rule(grpo)


def _estimator(grpo: GRPOConfig) -> Iterator[Problem]:
    adv, kind = grpo.adv_estimator, estimator_kind_of(grpo)
    if grpo.use_leave_one_out_baseline and not kind.chooses_baseline:
        yield Problem(
            key="grpo.use_leave_one_out_baseline=true",
            rule=f"belongs to the estimator {_estimators_with('chooses_baseline')} and would do nothing with "
            f"{adv.name}",
            remedy="set it to false; the estimator rloo has this baseline",
        )
    if kind.problems is not None:
        yield from kind.problems(grpo)
    if adv.reward_weights and not (kind.weighs_components or ESTIMATOR_KINDS.is_own(adv.name)):
        yield Problem(
            key=f"grpo.adv_estimator.reward_weights={adv.reward_weights}",
            rule=f"would do nothing with the estimator {adv.name}, which sees the sum of the components",
            remedy=f"use grpo.adv_estimator.name={_estimators_with('weighs_components')}, or weigh the "
            "components in the environment",
        )


def _clip(grpo: GRPOConfig) -> Iterator[Problem]:
    for name in ("advantage_clip_low", "advantage_clip_high"):
        bound = getattr(grpo, name)
        if bound is not None and estimator_kind_of(grpo).has_critic:
            yield Problem(
                key=f"grpo.{name}={bound:g}",
                rule="clips a sample's advantage, and with "
                f"grpo.adv_estimator.name={grpo.adv_estimator.name} each token has its own",
                remedy="set it to null",
            )


def _estimators_with(what: str) -> str:
    """Return the names of the shipped estimators whose kind has this property."""
    return " or ".join(name for name in ESTIMATOR_KINDS.names() if getattr(ESTIMATOR_KINDS.load(name), what))


def _filters(grpo: GRPOConfig) -> Iterator[Problem]:
    names = grpo.sample_filters
    for index, name in enumerate(names):
        key = f"grpo.sample_filters[{index}]"
        if name in names[:index]:
            yield Problem(key=f"{key}={name}", rule="stands there twice", remedy="leave one of them out")


def _group_size(grpo: GRPOConfig) -> Iterator[Problem]:
    size = grpo.num_generations_per_prompt
    if size == 1 and (estimator_kind_of(grpo).judges_in_groups or grpo.use_dynamic_sampling):
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


def _dynamic_sampling(grpo: GRPOConfig) -> Iterator[Problem]:
    for name in ("dynamic_sampling_component", "dynamic_sampling_num_prompts"):
        value = getattr(grpo, name)
        if value is not None and not grpo.use_dynamic_sampling:
            yield Problem(
                key=f"grpo.{name}={value}",
                rule="has no effect with grpo.use_dynamic_sampling=false",
                remedy="set it to null, or grpo.use_dynamic_sampling=true",
            )
    if grpo.use_dynamic_sampling and grpo.rollout_shape.num_prompts < grpo.num_prompts_per_step:
        yield Problem(
            key=f"grpo.dynamic_sampling_num_prompts={grpo.dynamic_sampling_num_prompts}",
            rule=f"must be at least grpo.num_prompts_per_step={grpo.num_prompts_per_step}",
            remedy="no rollout could fill a step; null takes as many prompts as a step has",
        )


def _first_validation(grpo: GRPOConfig) -> Iterator[Problem]:
    if grpo.val_start_at > 0 and grpo.val_period == 0:
        yield Problem(
            key=f"grpo.val_start_at={grpo.val_start_at}",
            rule="has no effect with grpo.val_period=0, which never validates between steps",
            remedy="set grpo.val_period, or grpo.val_start_at=0",
        )


def _early_stop(grpo: GRPOConfig) -> Iterator[Problem]:
    if grpo.val_stop_threshold is not None and grpo.val_period == 0:
        yield Problem(
            key=f"grpo.val_stop_threshold={grpo.val_stop_threshold:g}",
            rule="stops nothing with grpo.val_period=0, which never validates between steps",
            remedy="set grpo.val_period, or grpo.val_stop_threshold=null",
        )
