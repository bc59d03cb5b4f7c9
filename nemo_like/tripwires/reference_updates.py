"""Computes an optimizer's update a second way, in float64, and says how far a real one may be from it.

    g    = (m1 - b1 m0) / (1 - b1)                        the gradient, from Adam's first moments
    v1   = b2 v0 + (1 - b2) g^2
    w1   = w0 (1 - lr decay) - lr (m1 / (1 - b1^t)) / (sqrt(v1 / (1 - b2^t)) + eps)

0 stands for before the update and 1 for after it, t counts updates. An optimizer has its formula here under
the names of what it keeps of each tensor; what has no formula here is not judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# Below this, a second moment may have been rounded to 0: (1 - b2) g^2 is smaller than float32's numbers.
_TINY = 2.0**-120
# How many roundings a result has at most. The update itself has the most: some libraries compute the
# corrections 1 - b^t in float32.
_ROUNDINGS, _UPDATE_ROUNDINGS = 8.0, 128.0


@dataclass(frozen=True, slots=True)
class Sampled:
    """Some elements of what an optimizer updates, at one time: weights, and each kind of its state, [E]
    float64."""

    weights: Tensor
    state: Mapping[str, Tensor]

    def only(self, chosen: Tensor) -> Sampled:
        """Return the elements where ``chosen`` [E] is true."""
        return Sampled(self.weights[chosen], {name: part[chosen] for name, part in self.state.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateSettings:
    """What the configuration says of an update; tensors have one value per element, [E] float64."""

    rates: Tensor
    decays: Tensor
    num_updates: Tensor  # with this one
    beta1: float
    beta2: float
    eps: float
    roundoff: float  # of the coarsest of weights and state, relative


@torch.no_grad()
def adamw_excess(before: Sampled, after: Sampled, cfg: UpdateSettings) -> Tensor:
    """Return for each element how far AdamW's second moment or weight is from its formula, in multiples of
    what rounding allows, [E]: up to 1 for a right one."""
    m0, m1 = before.state["exp_avg"], after.state["exp_avg"]
    v0, v1 = before.state["exp_avg_sq"], after.state["exp_avg_sq"]
    unit, rest = _ROUNDINGS * cfg.roundoff, 1 - cfg.beta1
    gradient = (m1 - cfg.beta1 * m0) / rest
    uncertain = unit * ((m1.abs() + m0.abs()) / rest + gradient.abs())
    due = cfg.beta2 * v0 + (1 - cfg.beta2) * gradient.square()
    squares = 2 * gradient.abs() * uncertain + uncertain.square()
    allowed = unit * (v0 + v1 + gradient.square()) + (1 - cfg.beta2) * squares + _TINY
    of_moment = (v1 - due).abs() / allowed

    first = m1 / (1 - cfg.beta1**cfg.num_updates)
    second = (v1 / (1 - cfg.beta2**cfg.num_updates)).sqrt()
    moved = cfg.rates * first / (second + cfg.eps)
    due = before.weights * (1 - cfg.rates * cfg.decays) - moved
    allowed = unit * (before.weights.abs() + after.weights.abs())
    allowed = allowed + _UPDATE_ROUNDINGS * cfg.roundoff * moved.abs() + _TINY
    return torch.maximum(of_moment, (after.weights - due).abs() / allowed).nan_to_num(nan=torch.inf)


# By what an optimizer keeps of a tensor from update to update, besides a count.
UPDATE_RULES: Mapping[frozenset[str], Callable[[Sampled, Sampled, UpdateSettings], Tensor]] = {
    frozenset({"exp_avg", "exp_avg_sq"}): adamw_excess,
}
