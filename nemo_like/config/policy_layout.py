"""What follows from the policy's parallel layout alone. Standard library only."""

from __future__ import annotations

import math

from nemo_like.config.schema import PolicyBackend, PolicyConfig


def policy_world_size(policy: PolicyConfig) -> int:
    """TP x PP x DP; FSDP has no pipeline."""
    if policy.backend is PolicyBackend.fsdp:
        return policy.fsdp_cfg.tensor_parallel_size * policy.data_parallel_size
    megatron = policy.megatron_cfg
    return (
        megatron.tensor_model_parallel_size
        * megatron.pipeline_model_parallel_size
        * policy.data_parallel_size
    )


def length_multiple(policy: PolicyConfig) -> int:
    """Lengths must divide by this: sequence parallelism cuts a sequence evenly over the TP ranks."""
    megatron = policy.megatron_cfg
    cuts = policy.backend is PolicyBackend.megatron and megatron.sequence_parallel
    return megatron.tensor_model_parallel_size if cuts else 1


def dynamic_length_multiple(policy: PolicyConfig) -> int:
    """The same for dynamic batches, whose lengths are rounded on purpose too."""
    return math.lcm(length_multiple(policy), policy.dynamic_batching.sequence_length_round)
