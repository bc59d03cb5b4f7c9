"""Megatron-core's mixed-precision optimizer, built from the configuration of a worker group.

With megatron_cfg.optimizer_cpu_offload it is Megatron-core's HybridDeviceOptimizer, all of whose parameters
have copies on the host: the float32 weights and their moments are there, and the CPU updates them.

Private part: one method of HybridDeviceOptimizer in megatron-core 0.16.1, which has no function that makes
the initial state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from torch import Tensor

from nemo_like.compat.foreach import use_torch_kernels
from nemo_like.policy.backends.muon import MOMENTUM, Muon, WholeMatrices
from nemo_like.policy.groups.layout import updates_on_host
from nemo_like.policy.groups.parallelism import shards_optimizer
from nemo_like.policy.megatron.library_values import megatron_values
from nemo_like.policy.megatron.matrix_updates import MuonOfMatrices, use_muon
from nemo_like.policy.options import OptimizerKind, TrainedGroupConfig

# The parameters of a precision-aware optimizer have no float32 copies on the GPU.
_ON_HOST = {
    "optimizer_cpu_offload": True,
    "optimizer_offload_fraction": 1.0,
    "use_precision_aware_optimizer": True,
}


@dataclass(frozen=True, slots=True)
class OptimizerState:
    """The state of the optimizer on this rank; empty before the first update."""

    first_moments: list[Tensor]  # of AdamW
    momenta: list[Tensor]  # of Muon
    steps: list[int]  # updates made, as each parameter group counts them, or on the host each parameter


def optimizer_state(optimizer: MegatronOptimizer) -> OptimizerState:
    """Return the state of an optimizer that ``build_optimizer`` built; the tensors are the optimizer's
    own."""
    moments: list[Tensor] = []
    momenta: list[Tensor] = []
    steps: list[int] = []
    for part in _updating_optimizers(optimizer):
        adam = part.optimizer
        moments += [state["exp_avg"] for state in adam.state.values() if "exp_avg" in state]
        momenta += [state[MOMENTUM] for state in adam.state.values() if MOMENTUM in state]
        is_on_host = isinstance(adam, HybridDeviceOptimizer)
        counting = adam.state.values() if is_on_host else adam.param_groups
        steps += [int(one["step"]) for one in counting if "step" in one]
    return OptimizerState(moments, momenta, steps)


def ensure_state(optimizer: MegatronOptimizer) -> None:
    """Create the optimizer's initial state where it has made no update yet."""
    for part in _updating_optimizers(optimizer):
        if isinstance(part.optimizer, HybridDeviceOptimizer):
            _ensure_host_state(part.optimizer)
        else:
            part.init_state_fn(part.optimizer, part.config)


def _ensure_host_state(optimizer: HybridDeviceOptimizer) -> None:
    for adam in optimizer.sub_optimizers:
        for param in (param for group in adam.param_groups for param in group["params"]):
            if not adam.state[param]:
                moments = {name: torch.zeros_like(param) for name in ("exp_avg", "exp_avg_sq")}
                adam.state[param] = {"step": torch.zeros(()), **moments}
    optimizer._sync_sub_optimizers_state_to_hdo()


def tensors_beside_model(optimizer: MegatronOptimizer, weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the optimizer's own tensors, which it holds besides the model's ``weights``.

    They are moments, and master weights where the optimizer has its own, each [parameters of this rank's
    part] float32. ``ensure_state`` must have been called before.
    """
    tensors: list[Tensor] = []
    for part in _updating_optimizers(optimizer):
        adam = part.optimizer
        tensors += [weight.data for group in adam.param_groups for weight in group["params"]]
        tensors += [
            value for state in adam.state.values() for value in state.values() if isinstance(value, Tensor)
        ]
    of_model = {weight.untyped_storage().data_ptr() for weight in weights}
    return [tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in of_model]


def chained_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain, or a list with the only optimizer."""
    return getattr(optimizer, "chained_optimizers", [optimizer])


def kind_of(optimizer: MegatronOptimizer) -> OptimizerKind:
    """Return the kind of an optimizer that ``build_optimizer`` built."""
    inner = (part.optimizer for part in _updating_optimizers(optimizer))
    has_muon = any(isinstance(one, MuonOfMatrices) for one in inner)
    return OptimizerKind.muon if has_muon else OptimizerKind.adamw


def _updating_optimizers(optimizer: MegatronOptimizer) -> list[MegatronOptimizer]:
    """Return the optimizers of a chain that have parameters to update."""
    return [part for part in chained_optimizers(optimizer) if not part.is_stub_optimizer]


def optimizer_config(cfg: TrainedGroupConfig, dtype: torch.dtype) -> OptimizerConfig:
    """Return Megatron-core's configuration of AdamW for trained parameters in ``dtype``.

    Raises Megatron-core's errors about arguments in ``megatron_cfg.optimizer_kwargs``.
    """
    adam = cfg.optimizer
    return OptimizerConfig(
        optimizer="adam",
        lr=adam.lr,
        weight_decay=adam.weight_decay,
        adam_beta1=adam.adam_beta1,
        adam_beta2=adam.adam_beta2,
        adam_eps=adam.adam_eps,
        clip_grad=cfg.max_grad_norm,
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        loss_scale=1.0 if dtype is torch.float16 else None,  # the backend scales (backends/loss_scaling.py)
        params_dtype=dtype,
        use_distributed_optimizer=shards_optimizer(cfg),
        **{
            **megatron_values(OptimizerConfig, cfg.megatron_cfg.optimizer_kwargs),
            **(_ON_HOST if updates_on_host(cfg) else {}),
        },
    )


def build_optimizer(
    cfg: TrainedGroupConfig,
    chunks: list[DistributedDataParallel],
    dtype: torch.dtype,
    matrices: Mapping[Tensor, WholeMatrices],
) -> MegatronOptimizer:
    """Build the optimizer of the chunks of a model whose trained parameters are in ``dtype``, with float32
    master weights for half precision: Muon of ``matrices``, AdamW of all other parameters. Biases and norms
    have no weight decay."""
    use_torch_kernels()
    optimizer = get_megatron_optimizer(optimizer_config(cfg, dtype), chunks)
    if matrices:
        for part in _updating_optimizers(optimizer):
            use_muon(part, Muon.of(cfg), matrices)
    if updates_on_host(cfg):
        # To load a checkpoint into no state Megatron-core would first make an update with random gradients.
        ensure_state(optimizer)
    configure_groups(optimizer, cfg)
    return optimizer


def configure_groups(optimizer: MegatronOptimizer, cfg: TrainedGroupConfig) -> None:
    """Set what the configuration says of AdamW in every parameter group; a loaded checkpoint brings the
    settings of the run that wrote it."""
    adam = cfg.optimizer
    for group in optimizer.param_groups:
        # Megatron-core applies a group's multiplier of the weight decay only in its own scheduler.
        group["weight_decay"] = adam.weight_decay * group["wd_mult"]
        group["betas"], group["eps"] = (adam.adam_beta1, adam.adam_beta2), adam.adam_eps
        if updates_on_host(cfg):
            group["fused"] = True  # a checkpoint of an optimizer on the GPU does not say so
            for name in ("cpu_optimizer_cls", "gpu_optimizer_cls"):
                group.pop(name, None)  # a class is nothing that a checkpoint can be loaded with
