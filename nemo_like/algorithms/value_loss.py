"""The loss of a critic (PPO, arXiv 1707.06347; its clipping as in arXiv 2005.12729)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ValueLossTerms:
    """A critic's loss on M tokens: ``per_token`` [M], to differentiate, and ``is_clipped`` [M] float32, which
    is 1 where clipping removed the gradient."""

    per_token: Tensor
    is_clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float | None
) -> ValueLossTerms:
    """Compute half the squared error of each token's value, [M].

    With ``clip_range`` c it is the larger of (V - R)^2 / 2 and (clip(V, V_old - c, V_old + c) - R)^2 / 2:
    an update does not gain from moving a value further than c from ``old_values``, which it had when the
    advantages were computed. None does not clip. All tensors are [M], in units of the reward.
    """
    plain = (values - returns).square()
    if clip_range is None:
        return ValueLossTerms(plain / 2, values.new_zeros(values.shape))
    kept = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (kept - returns).square()
    is_clipped = ((clipped > plain) & ((values - old_values).abs() > clip_range)).float()
    return ValueLossTerms(plain.maximum(clipped) / 2, is_clipped)
