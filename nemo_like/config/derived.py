"""What follows from a configuration: the rules check by it and the run decides by it, so that both agree.

Standard library only.
"""

from __future__ import annotations

import math
from enum import Enum
from pathlib import Path
from urllib.parse import urlparse

from nemo_like.config.schema import (
    ClusterConfig,
    Config,
    Device,
    LossConfig,
    Placement,
    PolicyBackend,
    PolicyConfig,
    WeightTransport,
)


class Stage(Enum):
    """The stages that have deadlines, by their keys in cluster.stage_timeouts_s."""

    weight_sync = "weight_sync"
    generation = "generation"
    logprobs = "logprobs"
    policy_training = "policy_training"
    checkpoint = "checkpoint"
    validation = "validation"


def deadline_s(cfg: ClusterConfig, stage: Stage) -> float:
    """Its own, or that of every stage."""
    own = getattr(cfg.stage_timeouts_s, stage.name)
    return cfg.stage_timeout_s if own is None else float(own)


def longest_deadline_s(cfg: ClusterConfig) -> float:
    """For what has to last as long as any stage."""
    return max(deadline_s(cfg, stage) for stage in Stage)


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


def scores_prev_logprobs(loss: LossConfig) -> bool:
    """Whether the trainer computes log-probs of the samples before it trains on them."""
    return not (loss.force_on_policy_ratio or loss.use_generation_logprobs_as_prev)


def is_own_loss(loss: LossConfig) -> bool:
    """Whether ``loss_fn.kind`` names a function of the user's."""
    return ":" in loss.kind


def is_advantage_alone(loss: LossConfig) -> bool:
    """Whether a sample of advantage 0 has no gradient: nothing else enters the loss, as far as we know."""
    return not (loss.reference_policy_kl_penalty or loss.entropy_coef or is_own_loss(loss))


def shares_gpus(cfg: Config) -> bool:
    """Whether engines have the policy workers' GPUs, and sleep while the policy computes."""
    has_both = cfg.rollout.replay is None and not cfg.rollout.generate_only
    on_gpu = cfg.policy.device is Device.cuda
    return has_both and on_gpu and cfg.cluster.placement is Placement.colocated


def weight_transport(cfg: Config) -> WeightTransport:
    """The configured one; between processes on one GPU there is a single way."""
    transport = cfg.generation.weight_transport
    return WeightTransport.cuda_ipc if transport is WeightTransport.auto and shares_gpus(cfg) else transport


def mlflow_directory(uri: str) -> Path | None:
    """The local directory that a tracking URI names; None when it names something else."""
    parsed = urlparse(uri)
    return Path(parsed.path).absolute() if parsed.scheme in ("", "file") else None
