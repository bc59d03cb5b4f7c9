"""Values that follow from a configuration. The rules and the run both read them here, so that they agree.

Standard library only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import TypeGuard
from urllib.parse import urlparse

from nemo_like.config.adapter_layers import adapts_all_linear
from nemo_like.config.named_functions import is_own_function
from nemo_like.config.schema import (
    ClusterConfig,
    Config,
    Device,
    LoraSync,
    LossConfig,
    Overlap,
    Placement,
    PolicyBackend,
    PolicyConfig,
    RolloutConfig,
    TeacherConfig,
    TeacherScoring,
    WeightTransport,
)
from nemo_like.config.speculation import has_draft_weights

# The folder of a run's directory in which its journal is.
JOURNAL_FOLDER = "journal"


class Stage(Enum):
    """The stages of a step that have deadlines, named like their keys in cluster.stage_timeouts_s."""

    weight_sync = "weight_sync"
    generation = "generation"
    logprobs = "logprobs"
    teacher_logprobs = "teacher_logprobs"
    values = "values"
    policy_training = "policy_training"
    value_training = "value_training"
    checkpoint = "checkpoint"
    validation = "validation"


def deadline_s(cfg: ClusterConfig, stage: Stage) -> float:
    """Return a stage's deadline in seconds: its own, or the general one where it has none."""
    own = getattr(cfg.stage_timeouts_s, stage.name)
    return cfg.stage_timeout_s if own is None else float(own)


def longest_deadline_s(cfg: ClusterConfig) -> float:
    """Return the longest deadline of any stage in seconds, for whatever must outlast every stage."""
    return max(deadline_s(cfg, stage) for stage in Stage)


def is_one_engine(group: PolicyConfig) -> TypeGuard[TeacherConfig]:
    """Return whether one vLLM engine takes the place of a group's workers, as it may with a teacher."""
    return isinstance(group, TeacherConfig) and group.scored_by is TeacherScoring.engine


def stage_size(policy: PolicyConfig) -> int:
    """Return how many ranks one pipeline stage has, TP x CP x DP, with Megatron-core."""
    megatron = policy.megatron_cfg
    return megatron.tensor_model_parallel_size * megatron.context_parallel_size * policy.data_parallel_size


def policy_world_size(policy: PolicyConfig) -> int:
    """Return the number of policy workers: TP x CP x PP x DP, or TP x DP with FSDP."""
    if policy.backend is PolicyBackend.fsdp:
        return policy.fsdp_cfg.tensor_parallel_size * policy.data_parallel_size
    return stage_size(policy) * policy.megatron_cfg.pipeline_model_parallel_size


def length_multiple(policy: PolicyConfig) -> int:
    """Return the number that every sequence's length must be a multiple of.

    Context parallelism cuts a sequence into two pieces for each of its ranks, and sequence parallelism cuts
    what a rank has evenly over the TP ranks.
    """
    megatron = policy.megatron_cfg
    if policy.backend is not PolicyBackend.megatron:
        return 1
    pieces = 2 * megatron.context_parallel_size if megatron.context_parallel_size > 1 else 1
    return pieces * (megatron.tensor_model_parallel_size if megatron.sequence_parallel else 1)


def dynamic_length_multiple(policy: PolicyConfig) -> int:
    """Return the same number for dynamic batches, whose lengths are also rounded to
    ``sequence_length_round``."""
    return math.lcm(length_multiple(policy), policy.dynamic_batching.sequence_length_round)


def scores_prev_logprobs(loss: LossConfig) -> bool:
    """Return whether the trainer computes the samples' prev_logprobs before it trains on them."""
    return not (loss.force_on_policy_ratio or loss.use_generation_logprobs_as_prev)


def is_own_loss(loss: LossConfig) -> bool:
    """Return whether ``loss_fn.kind`` names a user's own function."""
    return is_own_function(loss.kind)


def has_teacher(loss: LossConfig) -> bool:
    """Return whether the shipped loss compares with a teacher."""
    return loss.kind == "distillation"


def clips_ratio(loss: LossConfig) -> bool:
    """Return whether the loss's clipped ratio is the ratio cut at ratio_clip_min and ratio_clip_max."""
    return loss.kind in ("policy_gradient", "gspo_token", "distillation")


def has_reference_loss(loss: LossConfig) -> bool:
    """Return whether tripwires can compute the loss anew: they know no function of a user's own, and nothing
    of a teacher."""
    return not (is_own_loss(loss) or has_teacher(loss))


def is_advantage_alone(loss: LossConfig) -> bool:
    """Return whether a sample with advantage 0 has no gradient, because nothing else enters the loss.

    It is false for a user's own loss, of which we cannot know.
    """
    has_more = loss.reference_policy_kl_penalty or loss.entropy_coef or has_teacher(loss)
    return not (has_more or is_own_loss(loss))


def dumps_rollouts_of(step: int, cfg: RolloutConfig) -> bool:
    """Return whether to dump the conversations of training step ``step``."""
    return cfg.dump_period > 0 and step % cfg.dump_period == 0


def groups_per_part(cfg: Config) -> int | None:
    """Return of how many groups the parts of a rollout are multiples, with which the step begins before all
    groups are there; None where a step waits for all.

    A multiple of the number of replicas, of the policy and of a teacher, so that each gets equally many
    samples of a part, and whole groups.
    """
    if cfg.grpo.overlap is not Overlap.exact:
        return None
    groups = [cfg.policy] if cfg.teacher is None else [cfg.policy, cfg.teacher]
    return math.lcm(*(group.data_parallel_size for group in groups))


def first_update_generations(cfg: Config) -> int:
    """Return how many samples of each group are in the first update of a step, where updates mix groups."""
    return cfg.policy.train_global_batch_size // cfg.grpo.num_prompts_per_step


def depends_on_timing(cfg: Config) -> bool:
    """Return whether metrics depend on which group ends first, or when weights come."""
    return cfg.grpo.overlap is Overlap.exact or cfg.grpo.max_staleness > 0


def asks_endpoint(cfg: Config) -> bool:
    """Return whether a server behind an OpenAI-compatible API answers in place of engines."""
    return cfg.evaluation is not None and cfg.evaluation.base_url is not None


def shares_gpus(cfg: Config) -> bool:
    """Return whether the engines share the policy workers' GPUs, and so sleep while the policy computes."""
    has_both = cfg.rollout.replay is None and not cfg.rollout.generate_only
    on_gpu = cfg.policy.device is Device.cuda
    return has_both and on_gpu and cfg.cluster.placement is Placement.colocated


def weight_transport(cfg: Config) -> WeightTransport:
    """Return the configured weight transport; where engines share the policy workers' GPUs, auto becomes
    cuda_ipc, the only one that works there."""
    transport = cfg.generation.weight_transport
    return WeightTransport.cuda_ipc if transport is WeightTransport.auto and shares_gpus(cfg) else transport


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """What an engine must know of the adapters that it will compute beside its weights."""

    rank: int
    target_modules: tuple[str, ...]  # last parts of the layers' names; none: all that vLLM can adapt


def engine_adapter(cfg: Config) -> EngineAdapter | None:
    """Return what engines must know of the adapters that they get; None where they get whole models."""
    lora = cfg.policy.lora
    if not lora.enabled or cfg.generation.lora_sync is LoraSync.merged:
        return None
    targets = () if adapts_all_linear(lora) else tuple(lora.target_modules)
    return EngineAdapter(lora.rank, targets)


def keeps_weights_asleep(cfg: Config) -> bool:
    """Return whether engines that sleep must keep their weights in host memory.

    They need not where a transfer brings every weight as vLLM computes with it: no adapters, no changes, no
    weights that vLLM quantises, and none of a draft.
    """
    sends_all = engine_adapter(cfg) is None and not cfg.generation.weight_delta
    is_quantized = cfg.generation.vllm_cfg.quantization is not None
    return not sends_all or is_quantized or has_draft_weights(cfg.generation)


def mlflow_directory(uri: str) -> Path | None:
    """Return the local directory that a tracking URI names; None when it names something else."""
    parsed = urlparse(uri)
    return Path(parsed.path).absolute() if parsed.scheme in ("", "file") else None


def further_models(teacher: TeacherConfig) -> tuple[str, ...]:
    """Return the checkpoints of a teacher beside ``model_name``, each once."""
    return tuple(model for model in dict.fromkeys(teacher.models.values()) if model != teacher.model_name)
