"""Rules on ``loss_fn``: which of its keys exclude each other, and what they need of ``grpo``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from nemo_like.algorithms.loss_traits import scores_prev_logprobs
from nemo_like.algorithms.named_functions import FunctionRole, unknown_function
from nemo_like.algorithms.options import (
    AdvantageEstimatorName,
    GRPOConfig,
    ImportanceSamplingType,
    LossConfig,
)
from nemo_like.config.problems import Problem

_DIVERGENCES = ("reverse", "reverse_topk", "forward", "jensen_shannon")


_DISTILLATION_REMEDIES = {
    "weight": "1 is usual; without a teacher use loss_fn.kind=policy_gradient",
    "reward_weight": "0 learns from the teacher alone, 1 from rewards as well",
    "beta": "0.5 is the symmetric divergence",
    "top_k": "32 is usual",
}


_REPLACING = ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios")


def loss_problems(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield every combination of keys that would train with another loss than the keys say."""
    if problem := unknown_function(FunctionRole.loss, "loss_fn.kind", loss.kind):
        yield problem
    yield from _surrogates(loss)
    if loss.kind == "sapo":
        yield from _sapo(loss)
    if loss.kind == "gspo_token":
        yield from _gspo_token(loss)
    if loss.kind == "distillation":
        yield from _distillation(loss)
    yield from _sequence_level(loss)
    yield from _correction(loss)
    if loss.use_generation_logprobs_as_prev:
        yield from _generation_as_prev(loss)
    if not scores_prev_logprobs(loss):
        yield from _unscored(loss, grpo)
    if loss.use_kl_in_reward:
        yield from _kl_in_reward(loss, grpo)


def _surrogates(loss: LossConfig) -> Iterator[Problem]:
    """Yield problems of the choice between PPO's clipped surrogate, CISPO, GSPO and REINFORCE.

    They exclude each other, and the dual clip belongs to PPO's surrogate and to GSPO.
    """
    chosen = [name for name in _REPLACING if getattr(loss, name)]
    if len(chosen) > 1:
        yield Problem(
            key=f"loss_fn.{chosen[0]}=true",
            rule=f"excludes loss_fn.{chosen[1]}=true: each replaces the loss by another",
            remedy="set one of them to false",
        )
    if loss.ratio_clip_c is not None and (loss.disable_ppo_ratio or loss.use_cispo):
        yield Problem(
            key=f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}",
            rule=f"bounds a loss that loss_fn.{chosen[0]}=true replaces",
            remedy="set it to null",
        )


def _excluded(loss: LossConfig, switches: Iterable[str]) -> Iterator[Problem]:
    """Yield a problem for each of these switches that is on beside a kind which replaces the loss itself."""
    for name in switches:
        if getattr(loss, name):
            yield Problem(
                key=f"loss_fn.{name}=true",
                rule=f"excludes loss_fn.kind={loss.kind}: each replaces the loss by another",
                remedy="set it to false, or loss_fn.kind=policy_gradient",
            )


def _sapo(loss: LossConfig) -> Iterator[Problem]:
    yield from _excluded(loss, _REPLACING)
    if loss.ratio_clip_c is not None:
        yield Problem(
            key=f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}",
            rule="bounds a loss that loss_fn.kind=sapo replaces",
            remedy="set it to null",
        )
    for name, value in loss.arguments.items():
        if name in ("tau_pos", "tau_neg") and isinstance(value, int | float) and not value > 0:
            yield Problem(
                key=f"loss_fn.arguments.{name}={value}",
                rule="must be above 0",
                remedy="1.0 for tau_pos and 1.05 for tau_neg are usual; larger values close the gate sooner",
            )


def _gspo_token(loss: LossConfig) -> Iterator[Problem]:
    if not loss.sequence_level_importance_ratios:
        yield Problem(
            key="loss_fn.kind=gspo_token",
            rule="needs sequence_level_importance_ratios=true: its ratio is that of the whole sample",
            remedy="set loss_fn.sequence_level_importance_ratios=true",
        )
    yield from _excluded(loss, ("disable_ppo_ratio", "use_cispo"))


def _distillation(loss: LossConfig) -> Iterator[Problem]:
    key, arguments = "loss_fn.arguments", loss.arguments
    divergence = arguments.get("divergence", "reverse")
    if divergence not in _DIVERGENCES:
        yield Problem(
            key=f"{key}.divergence={divergence}",
            rule=f"must be one of {', '.join(_DIVERGENCES)}",
            remedy="reverse needs the teacher's log-prob of the sampled token alone",
        )
        return
    if "top_k" in arguments and divergence == "reverse":
        yield Problem(
            key=f"{key}.top_k={arguments['top_k']}",
            rule="has no effect with divergence=reverse, which compares the sampled tokens",
            remedy="leave it out, or choose reverse_topk",
        )
    if "beta" in arguments and divergence != "jensen_shannon":
        yield Problem(
            key=f"{key}.beta={arguments['beta']}",
            rule=f"has no effect with divergence={divergence}",
            remedy="leave it out, or choose jensen_shannon",
        )
    if divergence == "reverse" and loss.sequence_level_importance_ratios:
        yield Problem(
            key="loss_fn.sequence_level_importance_ratios=true",
            rule="spreads the gradient evenly over a sample, and divergence=reverse gives each token its own",
            remedy="set it to false, or choose reverse_topk with reward_weight above 0",
        )
    if divergence != "reverse" and arguments.get("reward_weight", 0) == 0:
        yield from _without_policy_gradient(loss, divergence)
    bounds: dict[str, tuple[Callable[[float], bool], str]] = {
        "weight": (lambda value: value > 0, "must be above 0"),
        "reward_weight": (lambda value: value >= 0, "must be at least 0"),
        "beta": (lambda value: 0 < value < 1, "must be above 0 and below 1"),
        "top_k": (lambda value: value >= 1, "must be at least 1"),
    }
    for name, (holds, rule) in bounds.items():
        value = arguments.get(name)
        if isinstance(value, int | float) and not holds(value):
            yield Problem(key=f"{key}.{name}={value}", rule=rule, remedy=_DISTILLATION_REMEDIES[name])


def _without_policy_gradient(loss: LossConfig, divergence: str) -> Iterator[Problem]:
    for name in (*_REPLACING, "use_importance_sampling_correction"):
        if getattr(loss, name):
            yield Problem(
                key=f"loss_fn.{name}=true",
                rule=f"has no effect with divergence={divergence} and reward_weight=0, which leave no policy "
                "gradient",
                remedy="set it to false, or loss_fn.arguments.reward_weight above 0",
            )
    if loss.ratio_clip_c is not None:
        yield Problem(
            key=f"loss_fn.ratio_clip_c={loss.ratio_clip_c:g}",
            rule=f"bounds nothing with divergence={divergence} and reward_weight=0, which leave no policy "
            "gradient",
            remedy="set it to null, or loss_fn.arguments.reward_weight above 0",
        )


def _sequence_level(loss: LossConfig) -> Iterator[Problem]:
    if not loss.token_level_loss:
        return
    if loss.sequence_level_importance_ratios:
        yield Problem(
            key="loss_fn.sequence_level_importance_ratios=true",
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
    if kind is ImportanceSamplingType.seq_mask and loss.sequence_level_importance_ratios:
        yield Problem(
            key=key,
            rule=(
                "excludes sequence_level_importance_ratios=true: it keeps each token's own weight, "
                "and GSPO has one per sample"
            ),
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
    if loss.use_kl_in_reward:
        yield Problem(
            key="loss_fn.use_kl_in_reward=true",
            rule=f"needs prev_logprobs, which {chosen}=true does not compute",
            remedy=f"set loss_fn.{chosen}=false",
        )


def _choice_against_scoring(loss: LossConfig) -> str:
    return "force_on_policy_ratio" if loss.force_on_policy_ratio else "use_generation_logprobs_as_prev"


def _kl_in_reward(loss: LossConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    key, estimator = "loss_fn.use_kl_in_reward=true", grpo.adv_estimator.name
    whitening = (
        AdvantageEstimatorName.reinforce_plus_plus.name,
        AdvantageEstimatorName.reinforce_plus_plus_baseline.name,
        AdvantageEstimatorName.gae.name,
    )
    if estimator not in whitening:
        yield Problem(
            key=key,
            rule=f"needs an estimator that whitens over tokens, not grpo.adv_estimator.name={estimator}",
            remedy=f"choose {' or '.join(whitening)}, or leave the KL in the loss",
        )
    if loss.reference_policy_kl_penalty == 0:
        yield Problem(
            key=key,
            rule="has no effect with reference_policy_kl_penalty=0",
            remedy="0.001 to 0.01 is usual for loss_fn.reference_policy_kl_penalty",
        )
