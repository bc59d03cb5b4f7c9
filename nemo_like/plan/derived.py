"""Values that follow from a configuration. The rules and the run both read them here, so that they agree.

Standard library only.
"""

from __future__ import annotations

import math

from nemo_like.algorithms.options import Overlap
from nemo_like.cluster.options import Placement
from nemo_like.configuration import Config
from nemo_like.generation.engine_spec import EngineAdapter
from nemo_like.generation.options import LoraSync, WeightTransport
from nemo_like.generation.speculation import has_draft_weights
from nemo_like.models.adapter_layers import adapts_all_linear, named_layers
from nemo_like.policy.options import Device


def groups_per_part(cfg: Config) -> int | None:
    """Return the number of groups of which each part of a rollout is a multiple; None when a step waits for
    all groups.

    A part trains before the rollout has ended. The number is a multiple of the data-parallel replicas of the
    policy and of a teacher, so that each replica gets equally many samples of a part, and whole groups.
    """
    if cfg.grpo.overlap is not Overlap.exact:
        return None
    groups = [cfg.policy] if cfg.teacher is None else [cfg.policy, cfg.teacher]
    return math.lcm(*(group.data_parallel_size for group in groups))


def first_update_generations(cfg: Config) -> int:
    """Return how many samples of each group are in the first update of a step, when updates mix groups."""
    return cfg.policy.train_global_batch_size // cfg.grpo.num_prompts_per_step


def depends_on_timing(cfg: Config) -> bool:
    """Return whether metrics depend on which group ends first, or on when weights arrive."""
    return cfg.grpo.overlap is Overlap.exact or cfg.grpo.max_staleness > 0


def shares_gpus(cfg: Config) -> bool:
    """Return whether the engines share the policy workers' GPUs, and so sleep while the policy computes."""
    has_both = cfg.rollout.replay is None and not cfg.rollout.generate_only
    on_gpu = cfg.policy.device is Device.cuda
    return has_both and on_gpu and cfg.cluster.placement is Placement.colocated


def weight_transport(cfg: Config) -> WeightTransport:
    """Return the configured weight transport.

    When engines share the policy workers' GPUs, ``auto`` becomes ``cuda_ipc``, which alone works there.
    """
    transport = cfg.generation.weight_transport
    return WeightTransport.cuda_ipc if transport is WeightTransport.auto and shares_gpus(cfg) else transport


def engine_adapter(cfg: Config) -> EngineAdapter | None:
    """Return the adapter that engines must expect; None when they get whole models."""
    lora = cfg.policy.lora
    if not lora.enabled or cfg.generation.lora_sync is LoraSync.merged:
        return None
    targets = () if adapts_all_linear(lora) else named_layers(lora)
    return EngineAdapter(lora.rank, targets)


def keeps_weights_asleep(cfg: Config) -> bool:
    """Return whether sleeping engines must keep their weights in host memory.

    They need not when each transfer brings every weight in the form with which vLLM computes: no adapters, no
    weight deltas, no weights that vLLM quantises, and no draft model.
    """
    sends_all = engine_adapter(cfg) is None and not cfg.generation.weight_delta
    is_quantized = cfg.generation.vllm_cfg.quantization is not None
    return not sends_all or is_quantized or has_draft_weights(cfg.generation)
