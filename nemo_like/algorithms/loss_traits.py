"""Questions on the chosen loss, which its kind and its keys answer."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind, OwnLossConfig, loss_kind_of
from nemo_like.algorithms.options import LOSS_KINDS, LossConfig


def scores_prev_logprobs(loss: LossConfig) -> bool:
    """Return whether the trainer computes the samples' prev_logprobs before it trains on them."""
    return not (loss.force_on_policy_ratio or loss.use_generation_logprobs_as_prev)


def reads_generation_logprobs(loss: LossConfig) -> bool:
    """Return whether training reads the log-probs with which the engine sampled."""
    return (
        loss.use_importance_sampling_correction
        or loss.use_on_policy_kl_approximation
        or loss.off_policy_mask_threshold is not None
        or not scores_prev_logprobs(loss)
    )


def trains_on_entropy(loss: LossConfig) -> bool:
    """Return whether only the tokens of highest entropy have a policy gradient."""
    return loss.top_entropy_quantile < 1


def punishes_messages(loss: LossConfig) -> bool:
    """Return whether responses of a wrong form have an advantage of their own."""
    return loss.invalid_tool_call_advantage is not None or loss.malformed_thinking_advantage is not None


def policy_gradient_of(loss: LossConfig) -> LossKind:
    """Return the kind whose formula weighs the advantages: the configured kind, or for a distillation the
    kind that ``loss_fn.policy_loss`` names."""
    name = getattr(loss, "policy_loss", None)
    kind: LossKind = loss_kind_of(loss) if name is None else LOSS_KINDS.load(name)
    return kind


def has_sample_ratio(loss: LossConfig) -> bool:
    """Return whether a sample has one ratio and one importance weight, in place of one per token."""
    if isinstance(loss, OwnLossConfig):
        return loss.sequence_level_importance_ratios
    return policy_gradient_of(loss).has_sample_ratio


def is_own_loss(loss: LossConfig) -> bool:
    """Return whether ``loss_fn.kind`` names a user's own loss, whose gradient is unknown."""
    return LOSS_KINDS.is_own(loss.kind)


def has_teacher(loss: LossConfig) -> bool:
    """Return whether the loss compares with a teacher."""
    return loss_kind_of(loss).has_teacher


def learns_from_teacher_alone(loss: LossConfig) -> bool:
    """Return whether the loss leaves rewards out."""
    return has_teacher(loss) and getattr(loss, "reward_weight", 1) == 0


def cuts_ratio(loss: LossConfig) -> bool:
    """Return whether the loss's clipped ratio is the ratio cut at ratio_clip_min and ratio_clip_max."""
    return policy_gradient_of(loss).cuts_ratio


def has_reference_loss(loss: LossConfig) -> bool:
    """Return whether tripwires can compute the loss anew."""
    return loss_kind_of(loss).reference is not None


def is_advantage_alone(loss: LossConfig) -> bool:
    """Return whether a sample with advantage 0 has no gradient, because nothing else enters the loss.

    It is false for a user's own loss, where this is unknown.
    """
    has_more = (
        loss.reference_policy_kl_penalty
        or loss.entropy_coef
        or loss.entropy_target is not None
        or loss.positive_example_nll_weight
        or has_teacher(loss)
        or punishes_messages(loss)
    )
    # Whether a token trains depends on the entropies of all samples of a step.
    return not (has_more or trains_on_entropy(loss) or is_own_loss(loss))
