"""Checks how weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.generation.engine_rules import adapter_problems
from nemo_like.generation.options import WeightTransport
from nemo_like.models.model_info import ModelInfo
from nemo_like.plan.derived import engine_adapter, shares_gpus
from nemo_like.policy.options import Device


def weight_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of the weight transport and of the weights that it sends."""
    transport, device = cfg.generation.weight_transport, cfg.policy.device
    if transport is WeightTransport.shared_memory and device is Device.cuda:
        yield Problem(
            key="generation.weight_transport=shared_memory",
            rule="maps host memory, and with policy.device=cuda the weights are on GPUs",
            remedy="set it to auto",
        )
    if transport is WeightTransport.cuda_ipc and device is Device.cpu:
        yield Problem(
            key="generation.weight_transport=cuda_ipc",
            rule="maps a GPU's memory, and with policy.device=cpu the weights are on the host",
            remedy="set it to auto",
        )
    if transport is WeightTransport.collective and shares_gpus(cfg):
        yield Problem(
            key="generation.weight_transport=collective",
            rule="is impossible with cluster.placement=colocated and policy.device=cuda: NCCL carries "
            "nothing between two processes on one GPU",
            remedy="set it to auto",
        )
    yield from adapter_problems(cfg.generation, cfg.policy)


def mixture_problems(cfg: Config, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem when engines on CPUs would compute adapters in a mixture of experts."""
    is_mixture = model.num_experts is not None
    if is_mixture and cfg.policy.device is Device.cpu and engine_adapter(cfg) is not None:
        yield Problem(
            key="generation.lora_sync=adapter",
            rule="is impossible for a mixture of experts with policy.device=cpu: an engine with adapters "
            "computes experts by a kernel for GPUs",
            remedy="set it to merged",
        )
