"""Stand-ins, made of torch's own kernels, for the optimizer kernels of Transformer Engine and Apex.

Where neither is installed (as on every CPU), Megatron-core falls back to loops over parameters with a host
synchronisation for each, and to torch's AdamW.

Private parts: names in the optimizer modules of megatron-core 0.16.1, which are set, and the ``_foreach_``
functions of torch 2.13.0. Megatron-core has no argument for optimizer kernels. This module can go with a
Megatron-core whose own fallback restores step counts; without it updates are slower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import clip_grads, distrib_optimizer, optimizer_config
from megatron.core.optimizer import optimizer as mixed_precision
from megatron.core.transformer.moe import moe_utils
from torch import Tensor
from torch.nn.utils import get_total_norm
from torch.optim.adamw import adamw


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW that counts steps per parameter group, as Transformer Engine's FusedAdam does.

    DistributedOptimizer saves and restores the state in that form. torch's own AdamW counts steps per
    parameter and would come back from a checkpoint with wrong counts.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        adam_w_mode: bool,
    ) -> None:
        if not adam_w_mode:
            raise ValueError("only decoupled weight decay (AdamW) is implemented")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient; ``closure`` is ignored."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if params:
                group["step"] = int(group.get("step", 0)) + 1
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        states = [self.state[param] for param in params]
        beta1, beta2 = group["betas"]
        # torch adds 1 to each parameter's step before it uses it; here all have the step of their group.
        steps = torch.full((len(params),), group["step"] - 1.0, device=params[0].device)
        adamw(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [*steps.unbind()],
            fused=True,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@functools.cache
def use_torch_kernels() -> None:
    """Make Megatron-core use this module's kernels where it found neither Transformer Engine nor Apex."""
    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None  # read unconditionally by the router
        # Asked unconditionally for an optimizer on the host; without an answer it would compare None.
        optimizer_config.is_te_min_version = lambda version: False
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    # GroupStepAdamW's state has the layout of Apex's FusedAdam: no step per parameter.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True
    clip_grads.l2_norm_impl = _l2_norm
    clip_grads.multi_tensor_scale_impl = mixed_precision.multi_tensor_scale_impl = _scale


def _l2_norm(
    chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], per_tensor: bool
) -> tuple[Tensor, None]:
    """Compute the norm over all the tensors, [1], with the signature of Apex's kernel."""
    return get_total_norm(tensors[0]).reshape(1), None


def _scale(chunk_size: int, overflow: Tensor, tensors: list[list[Tensor]], factor: float) -> None:
    """Set targets = sources * factor, with the signature of Apex's kernel."""
    sources, targets = tensors
    torch._foreach_copy_(targets, torch._foreach_mul(sources, factor))
