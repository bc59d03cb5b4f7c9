"""Checks how weights reach the engines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.generation.engine_rules import adapter_problems
from nemo_like.generation.options import WeightTransport
from nemo_like.plan.derived import shares_gpus
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
