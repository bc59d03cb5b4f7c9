"""AdamW for Megatron-core without Transformer Engine, and the learning-rate schedule."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core import optimizer as megatron_optimizer
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    distrib_optimizer,
    get_megatron_optimizer,
)
from torch import Tensor

from nemo_like.config.schema import LRDecayStyle, PolicyConfig, Precision, SchedulerConfig
from nemo_like.config.schema import OptimizerConfig as AdamConfig


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW that counts steps per parameter group, as Transformer Engine's FusedAdam does.

    DistributedOptimizer saves and restores its state on that understanding; torch's own AdamW keeps a
    step per parameter and comes back from a checkpoint with wrong counts.
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
        """One update of every parameter that has a gradient."""
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if not params:
                continue
            group["step"] = int(group.get("step", 0)) + 1
            self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for param in params:
            if not self.state[param]:
                self.state[param] = {
                    "exp_avg": torch.zeros_like(param),
                    "exp_avg_sq": torch.zeros_like(param),
                }
        beta1, beta2 = group["betas"]
        # One step tensor per parameter, since the kernel takes a list; they are all the group's.
        steps = [torch.tensor(float(group["step"]), device=param.device) for param in params]
        torch._fused_adamw_(
            params,
            [param.grad for param in params],
            [self.state[param]["exp_avg"] for param in params],
            [self.state[param]["exp_avg_sq"] for param in params],
            [],
            steps,
            amsgrad=False,
            lr=group["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


@functools.cache
def _use_group_step_adamw() -> None:
    """Let Megatron-core build GroupStepAdamW where it finds neither Transformer Engine nor Apex."""
    if not megatron_optimizer.USING_PYTORCH_OPTIMIZER:
        return
    megatron_optimizer.Adam = distrib_optimizer.Adam = GroupStepAdamW
    megatron_optimizer.USING_PYTORCH_OPTIMIZER = False
    # Its state has the layout of Apex's FusedAdam: no step per parameter.
    distrib_optimizer.HAVE_APEX_OR_TE = distrib_optimizer.USING_APEX_OPTIMIZER = True


def build_optimizer(cfg: PolicyConfig, model: torch.nn.Module, dtype: torch.dtype) -> MegatronOptimizer:
    """Megatron-core's optimizer over a DDP-wrapped model; fp32 master weights under bf16.

    Biases and norm weights are not decayed.
    """
    _use_group_step_adamw()
    adam: AdamConfig = cfg.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.adam_beta1,
            adam_beta2=adam.adam_beta2,
            adam_eps=adam.adam_eps,
            clip_grad=cfg.max_grad_norm,
            bf16=cfg.precision is Precision.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=cfg.megatron_cfg.use_distributed_optimizer,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    # Megatron-core applies the multipliers only through its own scheduler.
    for group in optimizer.param_groups:
        group["weight_decay"] = adam.weight_decay * group["wd_mult"]
    return optimizer


def learning_rate(update: int, peak: float, cfg: SchedulerConfig) -> float:
    """Rate of the update with this number, counted from 1.

    Warm-up: peak * update / warmup_updates. Then from the peak at ``warmup_updates`` down to
    ``min_lr`` at ``decay_updates`` and after, in the configured shape; ``constant`` stays at the peak.
    """
    if update <= cfg.warmup_updates:
        return peak * update / cfg.warmup_updates
    if cfg.decay_style is LRDecayStyle.constant:
        return peak
    span = cfg.decay_updates - cfg.warmup_updates
    progress = min(1.0, (update - cfg.warmup_updates) / span) if span > 0 else 1.0
    remaining = (
        1 - progress if cfg.decay_style is LRDecayStyle.linear else (1 + math.cos(math.pi * progress)) / 2
    )
    return cfg.min_lr + (peak - cfg.min_lr) * remaining
