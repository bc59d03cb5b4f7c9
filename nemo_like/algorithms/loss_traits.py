"""What the chosen loss needs and has, as its keys say."""

from __future__ import annotations

from nemo_like.algorithms.named_functions import is_own_function
from nemo_like.algorithms.options import LossConfig


def scores_prev_logprobs(loss: LossConfig) -> bool:
    """Return whether the trainer computes the samples' prev_logprobs before it trains on them."""
    return not (loss.force_on_policy_ratio or loss.use_generation_logprobs_as_prev)


def is_own_loss(loss: LossConfig) -> bool:
    """Return whether ``loss_fn.kind`` names a user's own function."""
    return is_own_function(loss.kind)


def has_teacher(loss: LossConfig) -> bool:
    """Return whether the shipped loss compares with a teacher."""
    return loss.kind == "distillation"


def clips_ratio(loss: LossConfig) -> bool:
    """Return whether the loss's clipped ratio is the ratio cut at ratio_clip_min and ratio_clip_max."""
    return loss.kind in ("policy_gradient", "gspo_token", "distillation")


def has_reference_loss(loss: LossConfig) -> bool:
    """Return whether tripwires can compute the loss anew: they know no function of a user's own, and nothing
    of a teacher."""
    return not (is_own_loss(loss) or has_teacher(loss))


def is_advantage_alone(loss: LossConfig) -> bool:
    """Return whether a sample with advantage 0 has no gradient, because nothing else enters the loss.

    It is false for a user's own loss, of which we cannot know.
    """
    has_more = loss.reference_policy_kl_penalty or loss.entropy_coef or has_teacher(loss)
    return not (has_more or is_own_loss(loss))
