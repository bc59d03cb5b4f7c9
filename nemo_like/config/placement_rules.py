"""Rules on engines that share GPUs with the policy workers."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.derived import policy_world_size, shares_gpus
from nemo_like.config.problems import Problem
from nemo_like.config.schema import Config


def placement_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with the engines' placement."""
    if shares_gpus(cfg):
        yield from _shared_gpus(cfg)


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
