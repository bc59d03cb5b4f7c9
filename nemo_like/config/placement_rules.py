"""Rules on engines that share GPUs with the policy workers, and on how weights reach engines."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.derived import policy_world_size, shares_gpus
from nemo_like.config.problems import Problem
from nemo_like.config.schema import Config, Device, WeightTransport


def placement_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with the engines' placement and with the weight transport."""
    if shares_gpus(cfg):
        yield from _shared_gpus(cfg)
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


def _shared_gpus(cfg: Config) -> Iterator[Problem]:
    """Yield every problem of engines that each have a part of one policy worker's GPU."""
    colocated = "with cluster.placement=colocated and policy.device=cuda"
    engine_tp, num_engines = cfg.generation.vllm_cfg.tensor_parallel_size, cfg.generation.num_engines
    num_workers = policy_world_size(cfg.policy)
    if engine_tp > 1:
        yield Problem(
            key=f"generation.vllm_cfg.tensor_parallel_size={engine_tp}",
            rule=f"must be 1 {colocated}: an engine shares the GPU of one policy worker",
            remedy="use more engines of one GPU each, or cluster.placement=separate",
        )
    if num_engines > num_workers:
        yield Problem(
            key=f"generation.num_engines={num_engines}",
            rule=f"must be at most the {num_workers} policy workers {colocated}: each shares one's GPU",
            remedy=f"try {num_workers}",
        )
    if cfg.generation.weight_transport is WeightTransport.collective:
        yield Problem(
            key="generation.weight_transport=collective",
            rule=f"is impossible {colocated}: NCCL carries nothing between two processes on one GPU",
            remedy="set it to auto",
        )
