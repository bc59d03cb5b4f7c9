"""Muon in Megatron-core's optimizers, which keep gradients, clipping, float32 weights and checkpoints, and
have another optimizer inside.

The matrices are those of the model's checkpoint: queries, keys, values, gate and up projection of fused
layers are matrices of their own, and so are each expert's. Tensor-parallel ranks gather their parts of a
matrix; each computes the whole change and keeps its part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from nemo_like.compat.foreach import GroupStepAdamW
from nemo_like.models.weight_names import Cut, Merge, Rule
from nemo_like.policy.backends.muon import MOMENTUM, Muon, WholeMatrices, of_stacked
from nemo_like.policy.loss.updated_tensors import is_matrix
from nemo_like.policy.megatron.model_chunks import ModelChunks
from nemo_like.policy.megatron.weight_conversion import (
    Geometry,
    ModelPart,
    cut,
    join,
    merge,
    rule_for,
    single_experts,
    split,
)

_IN_LAYERS = "decoder.layers."


class MuonOfMatrices(GroupStepAdamW):
    """Muon for the parameters in ``matrices``, and AdamW for all others, by the settings of their group."""

    def __init__(
        self, adam: torch.optim.Optimizer, muon: Muon, matrices: Mapping[Tensor, WholeMatrices]
    ) -> None:
        """Take the parameter groups of ``adam``."""
        first = adam.param_groups[0]
        settings = {name: first[name] for name in ("lr", "betas", "eps", "weight_decay")}
        super().__init__(adam.param_groups, **settings, adam_w_mode=True)
        self._muon, self._matrices = muon, matrices

    def create_state(self) -> None:
        """Create the state of every parameter that has had no update yet."""
        for param in (param for group in self.param_groups for param in group["params"]):
            if not self.state[param]:
                names = (MOMENTUM,) if param in self._matrices else ("exp_avg", "exp_avg_sq")
                self.state[param] = {name: torch.zeros_like(param.data) for name in names}

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        self.create_state()
        if others := [param for param in params if param not in self._matrices]:
            super()._update(group, others)
        for param in params:
            if param in self._matrices:
                assert param.grad is not None, "the caller leaves out parameters without a gradient"
                self._muon.update(
                    param,
                    param.grad,
                    self.state[param][MOMENTUM],
                    self._matrices[param],
                    rate=group["lr"],
                    decay=group["weight_decay"],
                )


@dataclass(frozen=True, slots=True)
class LayerMatrices:
    """The matrices that one parameter has parts of; see ``WholeMatrices``."""

    rule: Rule
    geometry: Geometry
    rank: int  # among those over which the matrices are cut
    size: int

    def __call__(self, part: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply ``function`` to each whole matrix; return this rank's part of the results."""
        if part.dim() > 2:
            return of_stacked(part, 2 if self.rule.merge is Merge.stacked else 1, function)
        matrices = split(self.rule, join(self.rule, self._gathered(part)), self.geometry)
        whole = merge(self.rule, [function(matrix) for matrix in matrices], self.geometry)
        return cut(self.rule, whole, self.rank, self.size)

    def _gathered(self, part: Tensor) -> list[Tensor]:
        if self.size == 1 or self.rule.cut is Cut.replicated:
            return [part]
        is_expert = self.rule.is_expert
        group = (
            parallel_state.get_expert_tensor_parallel_group()
            if is_expert
            else parallel_state.get_tensor_model_parallel_group()
        )
        parts = [torch.empty_like(part) for _ in range(self.size)]
        dist.all_gather(parts, part.contiguous(), group=group)
        return parts


def layer_matrices(model: ModelChunks, geometry: Geometry, part: ModelPart) -> dict[Tensor, WholeMatrices]:
    """Return the trained parameters of this rank's layers that are matrices, or stacks of experts' matrices,
    with what finds them whole."""
    found: dict[Tensor, WholeMatrices] = {}
    for name, parameter in model.named_tensors():
        if name.startswith(_IN_LAYERS) and is_matrix(name, parameter) and parameter.requires_grad:
            rule = rule_for(next(single_experts([(name, parameter)]))[0], part)
            found[parameter] = LayerMatrices(rule, geometry, *part.cut_of(rule))
    return found


def use_muon(optimizer: MegatronOptimizer, muon: Muon, matrices: Mapping[Tensor, WholeMatrices]) -> None:
    """Have the optimizer that ``optimizer`` wraps update ``matrices``, parameters of the model, by Muon."""
    # A parameter in half precision has a copy in float32, which is what the optimizer updates.
    updated = {getattr(parameter, "main_param", parameter): whole for parameter, whole in matrices.items()}
    inner = MuonOfMatrices(optimizer.optimizer, muon, updated)
    optimizer.optimizer, optimizer.init_state_fn = inner, _create_state


def _create_state(optimizer: MuonOfMatrices, config: Any = None) -> None:
    optimizer.create_state()
