"""Muon as torch has it, for dense models of transformers."""

from __future__ import annotations

from unittest import mock

import torch
from torch import Tensor

from nemo_like.policy.options import OptimizerConfig


class TorchMuon:
    """``torch.optim.Muon`` on the matrices of a model's layers, and ``torch.optim.AdamW`` on the rest."""

    def __init__(self, model: torch.nn.Module, adam: torch.optim.Optimizer, cfg: OptimizerConfig) -> None:
        self._adam = adam
        self._matrices = {
            parameter: (num_blocks(model, name), matrices_of(parameter, num_blocks(model, name)))
            for name, parameter in model.named_parameters()
            if ".layers." in name and parameter.dim() > 1 and not name.endswith("bias")
        }
        for group in adam.param_groups:
            group["params"] = [one for one in group["params"] if one not in self._matrices]
        self._muon = torch.optim.Muon(
            [matrix for _, matrices in self._matrices.values() for matrix in matrices],
            weight_decay=cfg.weight_decay,
            momentum=cfg.muon_momentum,
            nesterov=cfg.muon_nesterov,
            ns_steps=cfg.muon_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self.param_groups = [*adam.param_groups, *self._muon.param_groups]

    def zero_grad(self) -> None:
        self._adam.zero_grad()
        for parameter in self._matrices:
            parameter.grad = None

    def step(self) -> None:
        """One update; torch's iteration is in float64 and not in bfloat16, whose rounding is a matter of
        chance."""
        self._adam.step()
        for parameter, (count, matrices) in self._matrices.items():
            assert parameter.grad is not None
            for matrix, gradient in zip(matrices, matrices_of(parameter.grad, count), strict=True):
                matrix.grad = gradient.contiguous()
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
            self._muon.step()


def num_blocks(model: torch.nn.Module, name: str) -> int:
    """How many matrices of a checkpoint are one below the other in what transformers has of each expert; in
    gpt-oss a checkpoint has gate and up in one."""
    is_in_turn = getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False)
    return 2 if "gate_up" in name and not is_in_turn else 1


def matrices_of(parameter: Tensor, num_blocks: int) -> list[Tensor]:
    """Views of the matrices of a parameter of transformers: itself, or of each expert what its checkpoint
    has."""
    whole = parameter.detach()
    if whole.dim() == 2:
        return [whole]
    return [block for expert in whole for block in expert.chunk(num_blocks)]
