"""Rules on how weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.generation.options import LoraSync, WeightTransport
from nemo_like.models.model_info import ModelInfo
from nemo_like.plan.derived import engine_adapter, shares_gpus
from nemo_like.policy.options import Device

LARGEST_ENGINE_RANK = 512  # vLLM's largest max_lora_rank


def weight_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with the weight transport and with what it sends."""
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
    yield from _adapters(cfg)


def _adapters(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of engines that get adapters alone."""
    lora, sends_adapters = cfg.policy.lora, cfg.generation.lora_sync is LoraSync.adapter
    if sends_adapters and not lora.enabled:
        yield Problem(
            key="generation.lora_sync=adapter",
            rule="sends adapters, and with policy.lora.enabled=false there are none",
            remedy="set it to merged, or policy.lora.enabled=true",
        )
    if sends_adapters and cfg.generation.weight_delta:
        yield Problem(
            key="generation.weight_delta=true",
            rule="saves nothing with generation.lora_sync=adapter, since all values of an adapter change",
            remedy="set it to false",
        )
    if sends_adapters and lora.rank > LARGEST_ENGINE_RANK:
        yield Problem(
            key=f"policy.lora.rank={lora.rank}",
            rule=f"must be at most {LARGEST_ENGINE_RANK} with generation.lora_sync=adapter: vLLM computes no "
            "larger adapters",
            remedy="set generation.lora_sync=merged",
        )


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
