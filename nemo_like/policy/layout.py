"""What a policy's configuration says of its parallel layout. Standard library only."""

from __future__ import annotations

from nemo_like.cluster.coordinates import ParallelLayout
from nemo_like.config.schema import PolicyConfig


def parallel_layout(cfg: PolicyConfig) -> ParallelLayout:
    """Sizes of the named axes."""
    return ParallelLayout(
        tp=cfg.megatron_cfg.tensor_model_parallel_size,
        cp=1,
        dp=cfg.data_parallel_size,
        pp=cfg.megatron_cfg.pipeline_model_parallel_size,
    )


def shards_optimizer(cfg: PolicyConfig) -> bool:
    """Whether optimizer state is spread over data-parallel ranks; one rank has nothing to spread it over."""
    return cfg.megatron_cfg.use_distributed_optimizer and cfg.data_parallel_size > 1


def length_multiple(cfg: PolicyConfig) -> int:
    """Padded lengths must divide by this: sequence parallelism cuts a sequence evenly over the TP ranks."""
    return cfg.megatron_cfg.tensor_model_parallel_size if cfg.megatron_cfg.sequence_parallel else 1
