"""What follows from the policy's parallel layout alone. Standard library only."""

from __future__ import annotations

import math

from nemo_like.config.schema import PolicyBackend, PolicyConfig


def stage_size(policy: PolicyConfig) -> int:
    """Ranks of one pipeline stage, TP x CP x DP."""
    megatron = policy.megatron_cfg
    return megatron.tensor_model_parallel_size * megatron.context_parallel_size * policy.data_parallel_size


def policy_world_size(policy: PolicyConfig) -> int:
    """TP x CP x PP x DP; FSDP has neither contexts nor a pipeline."""
    if policy.backend is PolicyBackend.fsdp:
        return policy.fsdp_cfg.tensor_parallel_size * policy.data_parallel_size
    return stage_size(policy) * policy.megatron_cfg.pipeline_model_parallel_size


def length_multiple(policy: PolicyConfig) -> int:
    """Lengths must divide by this: context parallelism cuts a sequence into two pieces for each of its
    ranks, and sequence parallelism cuts what a rank has evenly over the TP ranks."""
    megatron = policy.megatron_cfg
    if policy.backend is not PolicyBackend.megatron:
        return 1
    pieces = 2 * megatron.context_parallel_size if megatron.context_parallel_size > 1 else 1
    return pieces * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def dynamic_length_multiple(policy: PolicyConfig) -> int:
    """The same for dynamic batches, whose lengths are rounded on purpose too."""
    return math.lcm(length_multiple(policy), policy.dynamic_batching.sequence_length_round)
