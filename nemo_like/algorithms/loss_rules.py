"""Rules on ``loss_fn``: which of its keys exclude each other, and which values of ``grpo`` they need."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.estimator_kind import estimator_kind_of
from nemo_like.algorithms.loss_kind import OwnLossConfig, loss_kind_of
from nemo_like.algorithms.loss_traits import (
    has_sample_ratio,
    has_teacher,
    scores_prev_logprobs,
    trains_on_entropy,
)
from nemo_like.algorithms.options import (
    ESTIMATOR_KINDS,
    GRPOConfig,
    ImportanceSamplingType,
    LossConfig,
    Overlap,
)
from nemo_like.config.problems import Problem


def loss_problems(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem for each combination of keys that would train by another loss than the keys say."""
    kind = loss_kind_of(loss)
    if loss.arguments and not kind.is_function:
        yield Problem(
            key=f"loss_fn.arguments={loss.arguments}",
            rule=f"are those of a function of your own, and loss_fn.kind={loss.kind} has keys",
            remedy=f"its keys are {', '.join(kind.own_keys(loss)) or 'those that every loss has'}",
        )
    if kind.problems is not None:
        yield from kind.problems(loss)
    yield from _sequence_level(loss)
    yield from _correction(loss)
    if loss.use_generation_logprobs_as_prev:
        yield from _generation_as_prev(loss)
    if not scores_prev_logprobs(loss):
        yield from _unscored(loss, grpo)
    if loss.use_kl_in_reward:
        yield from _kl_in_reward(loss, grpo)
    yield from _renewed_reference(loss)
    yield from _off_policy(loss)
    yield from _moving_entropy(loss)
    yield from _of_whole_updates(loss, grpo)


def _with_sample_ratio(loss: LossConfig) -> str:
    """Return the key=value that gives a sample one ratio."""
    if isinstance(loss, OwnLossConfig):
        return "loss_fn.sequence_level_importance_ratios=true"
    name = getattr(loss, "policy_loss", None)
    return f"loss_fn.kind={loss.kind}" if name is None else f"loss_fn.policy_loss={name}"


def _sequence_level(loss: LossConfig) -> Iterator[Problem]:
    if not loss.token_level_loss:
        return
    if has_sample_ratio(loss):
        yield Problem(
            key=_with_sample_ratio(loss),
            rule="needs token_level_loss=false: GSPO weighs every sample alike, whatever its length",
            remedy="set loss_fn.token_level_loss=false",
        )
    if loss.sequence_length_normalizer is not None:
        yield Problem(
            key=f"loss_fn.sequence_length_normalizer={loss.sequence_length_normalizer}",
            rule="divides each sample's token sum, which token_level_loss=true never forms",
            remedy="set loss_fn.token_level_loss=false, or the normalizer to null",
        )


def _correction(loss: LossConfig) -> Iterator[Problem]:
    kind = loss.truncated_importance_sampling_type
    low, high = loss.truncated_importance_sampling_ratio_min, loss.truncated_importance_sampling_ratio
    key = f"loss_fn.truncated_importance_sampling_type={kind.name if kind else 'null'}"
    if kind is None:
        for name, bound in (("ratio", high), ("ratio_min", low)):
            if bound is not None:
                yield Problem(
                    key=f"loss_fn.truncated_importance_sampling_{name}={bound:g}",
                    rule="has no effect with truncated_importance_sampling_type=null",
                    remedy="choose tis, icepop or seq_mask, or set the bound to null",
                )
        return
    if not loss.use_importance_sampling_correction:
        yield Problem(
            key=key,
            rule="has no effect with use_importance_sampling_correction=false",
            remedy="set loss_fn.use_importance_sampling_correction=true, or the type to null",
        )
    if kind is ImportanceSamplingType.seq_mask and has_sample_ratio(loss):
        yield Problem(
            key=key,
            rule=f"excludes {_with_sample_ratio(loss)}: it keeps each token's own weight, and there a sample "
            "has one",
            remedy="choose icepop, which leaves out whole samples by their weight there, or tis",
        )
    if high is None:
        yield Problem(
            key=key,
            rule="needs an upper bound, loss_fn.truncated_importance_sampling_ratio",
            remedy="2 is usual for tis, 5 for icepop, 1.002 for seq_mask",
        )
    if low is None and kind is not ImportanceSamplingType.tis:
        yield Problem(
            key=key,
            rule="needs a lower bound too, loss_fn.truncated_importance_sampling_ratio_min",
            remedy="0.5 is usual for icepop, 0.999 for seq_mask",
        )
    if low is not None and high is not None and low >= high:
        yield Problem(
            key=f"loss_fn.truncated_importance_sampling_ratio_min={low:g}",
            rule=f"must be below truncated_importance_sampling_ratio={high:g}",
            remedy="",
        )


def _generation_as_prev(loss: LossConfig) -> Iterator[Problem]:
    key = "loss_fn.use_generation_logprobs_as_prev=true"
    if loss.force_on_policy_ratio:
        yield Problem(
            key=key,
            rule="excludes loss_fn.force_on_policy_ratio=true, whose ratio is 1 whatever was sampled with",
            remedy="set one of them to false",
        )
    if loss.use_importance_sampling_correction:
        yield Problem(
            key=key,
            rule=(
                "leaves use_importance_sampling_correction nothing to correct: "
                "the ratio is to the engine's log-probs already"
            ),
            remedy="set loss_fn.use_importance_sampling_correction=false",
        )


def _unscored(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem for every key that needs prev_logprobs, which this loss does not compute."""
    chosen = _choice_against_scoring(loss)
    if grpo.seq_logprob_error_threshold is not None:
        yield Problem(
            key=f"grpo.seq_logprob_error_threshold={grpo.seq_logprob_error_threshold:g}",
            rule=f"masks samples by prev_logprobs, which {chosen}=true does not compute",
            remedy=f"set it to null, or loss_fn.{chosen}=false",
        )
    if trains_on_entropy(loss):
        yield Problem(
            key=f"loss_fn.top_entropy_quantile={loss.top_entropy_quantile:g}",
            rule=f"reads entropies, which come with prev_logprobs, which {chosen}=true does not compute",
            remedy=f"set it to 1, or loss_fn.{chosen}=false",
        )
    if loss.use_kl_in_reward:
        yield Problem(
            key="loss_fn.use_kl_in_reward=true",
            rule=f"needs prev_logprobs, which {chosen}=true does not compute",
            remedy=f"set loss_fn.{chosen}=false",
        )


def _choice_against_scoring(loss: LossConfig) -> str:
    return "force_on_policy_ratio" if loss.force_on_policy_ratio else "use_generation_logprobs_as_prev"


def _renewed_reference(loss: LossConfig) -> Iterator[Problem]:
    if loss.reference_policy_sync_steps is not None and loss.reference_policy_kl_penalty == 0:
        yield Problem(
            key=f"loss_fn.reference_policy_sync_steps={loss.reference_policy_sync_steps}",
            rule="has no effect with reference_policy_kl_penalty=0, which keeps no reference",
            remedy="set it to null, or loss_fn.reference_policy_kl_penalty above 0",
        )


def _off_policy(loss: LossConfig) -> Iterator[Problem]:
    if loss.use_on_policy_kl_approximation and (
        loss.use_kl_in_reward or not loss.reference_policy_kl_penalty
    ):
        yield Problem(
            key="loss_fn.use_on_policy_kl_approximation=true",
            rule="weighs a KL in the loss, and there is none: "
            f"reference_policy_kl_penalty={loss.reference_policy_kl_penalty:g}, "
            f"use_kl_in_reward={str(loss.use_kl_in_reward).lower()}",
            remedy="set it to false, or loss_fn.reference_policy_kl_penalty above 0 without use_kl_in_reward",
        )
    for key, neutral in (("off_policy_mask_threshold", None), ("top_entropy_quantile", 1.0)):
        value = getattr(loss, key)
        if value != neutral and has_teacher(loss):
            yield Problem(
                key=f"loss_fn.{key}={value:g}",
                rule=f"leaves out a part of a policy gradient, and loss_fn.kind={loss.kind} learns from a "
                "teacher too",
                remedy=f"set it to {'null' if neutral is None else neutral}",
            )


def _moving_entropy(loss: LossConfig) -> Iterator[Problem]:
    if loss.entropy_target is None:
        return
    if loss.entropy_coef is None:
        yield Problem(
            key=f"loss_fn.entropy_target={loss.entropy_target:g}",
            rule="moves loss_fn.entropy_coef, which is null",
            remedy="set loss_fn.entropy_coef=0, from which it begins",
        )
    if loss.entropy_coef_min > loss.entropy_coef_max:
        yield Problem(
            key=f"loss_fn.entropy_coef_min={loss.entropy_coef_min:g}",
            rule=f"must be at most entropy_coef_max={loss.entropy_coef_max:g}",
            remedy="",
        )


def _of_whole_updates(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem for every key that needs all samples of an update before the first one trains."""
    if grpo.overlap is Overlap.off:
        return
    for key, neutral in (("positive_example_nll_weight", 0.0), ("top_entropy_quantile", 1.0)):
        if (value := getattr(loss, key)) != neutral:
            yield Problem(
                key=f"loss_fn.{key}={value:g}",
                rule="needs all samples of an update, and grpo.overlap=exact begins with a few",
                remedy="set grpo.overlap=off",
            )


def _kl_in_reward(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    key, estimator = "loss_fn.use_kl_in_reward=true", grpo.adv_estimator.name
    whitening = [name for name in ESTIMATOR_KINDS.names() if ESTIMATOR_KINDS.load(name).whitens_tokens]
    if not estimator_kind_of(grpo).whitens_tokens:
        yield Problem(
            key=key,
            rule=f"needs an estimator that whitens over tokens, not grpo.adv_estimator.name={estimator}",
            remedy=f"choose {' or '.join(whitening)}, or leave the KL in the loss",
        )
    for name in ("advantage_clip_low", "advantage_clip_high"):
        if (bound := getattr(grpo, name)) is not None:
            yield Problem(
                key=f"grpo.{name}={bound:g}",
                rule="clips a sample's advantage, and with loss_fn.use_kl_in_reward=true each token has its "
                "own",
                remedy="set it to null",
            )
    if loss.reference_policy_kl_penalty == 0:
        yield Problem(
            key=key,
            rule="has no effect with reference_policy_kl_penalty=0",
            remedy="0.001 to 0.01 is usual for loss_fn.reference_policy_kl_penalty",
        )
