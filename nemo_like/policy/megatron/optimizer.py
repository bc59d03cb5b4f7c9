"""Megatron-core's mixed-precision optimizer, built from the policy's configuration."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from nemo_like.config.schema import PolicyConfig
from nemo_like.policy.megatron.foreach import use_torch_kernels
from nemo_like.policy.parallelism import shards_optimizer


@dataclass(frozen=True, slots=True)
class AdamState:
    """What Adam holds on this rank; nothing before the first update."""

    first_moments: list[Tensor]
    steps: list[int]  # updates made, as each group of parameters counts them


def adam_state(optimizer: MegatronOptimizer) -> AdamState:
    """Return the state of an optimizer that ``build_optimizer`` built; the tensors are its own."""
    moments: list[Tensor] = []
    steps: list[int] = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.is_stub_optimizer:
            continue
        adam = part.optimizer
        moments += [state["exp_avg"] for state in adam.state.values() if "exp_avg" in state]
        steps += [int(group["step"]) for group in adam.param_groups if "step" in group]
    return AdamState(moments, steps)


def build_optimizer(cfg: PolicyConfig, model: torch.nn.Module, dtype: torch.dtype) -> MegatronOptimizer:
    """Build AdamW over a DDP-wrapped model whose trained parameters are in ``dtype``, with float32 master
    weights for bfloat16. Biases and norms have no weight decay."""
    use_torch_kernels()
    adam = cfg.optimizer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=adam.lr,
            weight_decay=adam.weight_decay,
            adam_beta1=adam.adam_beta1,
            adam_beta2=adam.adam_beta2,
            adam_eps=adam.adam_eps,
            clip_grad=cfg.max_grad_norm,
            bf16=dtype is torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=shards_optimizer(cfg),
        ),
        [model],
        use_gloo_process_groups=False,
    )
    # Megatron-core applies a group's multiplier of the weight decay only in its own scheduler.
    for group in optimizer.param_groups:
        group["weight_decay"] = adam.weight_decay * group["wd_mult"]
    return optimizer
