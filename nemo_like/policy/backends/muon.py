"""Muon: moves a matrix by its momentum, orthogonalised and scaled.

It is of Jordan et al. 2024 (https://kellerjordan.github.io/posts/muon/). The scale is of Liu et al. 2025,
"Muon is scalable for LLM training" (arXiv 2502.16982): with 0.2 a change has the size of one by AdamW, so
that both have one learning rate and one weight decay.

    each part of a matrix     gradient ──▶ momentum ──▶ blend of both
    the whole matrix          blend ──▶ Newton and Schulz's iteration ──▶ x scale x sqrt(max(rows, columns))
    each part of a matrix     weight x (1 - rate x decay) - rate x its part of that

``torch.optim.Muon`` iterates in bfloat16 whatever it is given, and a rounding there moves a weight by up to a
sixth of the learning rate where a gradient has small singular values. So ranks that add a gradient up in
another order would train other weights. Here the iteration is in float32 where the group's precision is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nemo_like.policy.options import OptimizerConfig, OptimizerKind, Precision, TrainedGroupConfig

# The coefficients of x, x^3 and x^5 are Jordan's: steepest at 0, with all singular values then around 1.
_LINEAR, _CUBIC, _QUINTIC = 3.4445, -4.7750, 2.0315
_SMALLEST_NORM = 1e-7
# The name of a parameter's momentum in an optimizer's state, and so in checkpoints.
MOMENTUM = "momentum_buffer"

# Takes a parameter's blend, and returns the change of the parameter by applying the given function to each of
# its whole matrices; of a parameter that is cut over ranks the caller has its own part of both.
WholeMatrices = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Muon:
    """Muon's rule with the settings of a worker group."""

    momentum: float
    nesterov: bool
    ns_steps: int
    scale: float
    dtype: torch.dtype  # of the iteration

    @classmethod
    def of(cls, group: TrainedGroupConfig) -> Muon:
        """Return the rule with the settings of ``group``."""
        cfg: OptimizerConfig = group.optimizer
        dtype = torch.float32 if group.precision is Precision.float32 else torch.bfloat16
        return cls(cfg.muon_momentum, cfg.muon_nesterov, cfg.muon_ns_steps, cfg.muon_scale, dtype)

    @torch.no_grad()
    def update(
        self,
        weight: Tensor,
        gradient: Tensor,
        momentum: Tensor,
        of_whole: WholeMatrices,
        *,
        rate: float,
        decay: float,
    ) -> None:
        """Update this rank's part of a parameter and of its momentum, which begins with 0, in place."""
        momentum.lerp_(gradient, 1 - self.momentum)
        blend = gradient.lerp(momentum, self.momentum) if self.nesterov else momentum
        # In the iteration's dtype already, in which ranks have less to exchange.
        change = of_whole(blend.to(self.dtype), self.direction)
        weight.mul_(1 - rate * decay).sub_(change, alpha=rate)

    def direction(self, matrix: Tensor) -> Tensor:
        """Return the change of a whole matrix, [..., rows, columns], at a learning rate of 1, in float32."""
        scale = self.scale * max(matrix.shape[-2:]) ** 0.5
        return orthogonalised(matrix, self.ns_steps).float() * scale


def orthogonalised(matrices: Tensor, ns_steps: int) -> Tensor:
    """Return matrices, [..., rows, columns], with singular values around 1 in place of their own."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if is_tall else matrices
    shape, wide = wide.shape, wide.reshape(-1, *wide.shape[-2:])
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=_SMALLEST_NORM)
    for _ in range(ns_steps):
        gram = wide @ wide.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_CUBIC, alpha=_QUINTIC)
        wide = torch.baddbmm(wide, polynomial, wide, beta=_LINEAR)
    wide = wide.reshape(shape)
    return wide.mT if is_tall else wide


def of_stacked(stack: Tensor, num_blocks: int, function: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply ``function`` to the matrices of a stack of experts, [experts, blocks x rows, columns], each of
    which has ``num_blocks`` matrices, one below the other."""
    blocks = stack.unflatten(1, (num_blocks, -1)).flatten(0, 1)
    return function(blocks).reshape(stack.shape)


def check_kind(path: Path, stored: OptimizerKind, own: OptimizerKind, group: str) -> None:
    """Raise ValueError unless the optimizer of a checkpoint is of the kind of the one that would go on from
    it, in the worker group called ``group``."""
    if stored is not own:
        raise ValueError(
            f"the checkpoint {path} was saved with {group}.optimizer.kind={stored.value}, and this is "
            f"{own.value}; resume it with the same kind, or begin with its weights alone "
            "(checkpointing.resume_parts=weights)"
        )
