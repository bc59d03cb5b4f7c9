"""Derives facts from the keys of a worker group: its ranks, its length multiples, and a teacher's models."""

from __future__ import annotations

import math
from typing import TypeGuard

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TASK
from nemo_like.policy.backends.backend_kind import FLOAT32, axis_size, backend_kind_of, sequence_parts
from nemo_like.policy.options import (
    Fp8Recipe,
    LoraConfig,
    OptimizerKind,
    TeacherConfig,
    TeacherScoring,
    TrainedGroupConfig,
    WorkerGroupConfig,
)

# Transformer Engine's products take multiples of 16, with scales of blocks multiples of a block.
_FP8_MULTIPLE, _FP8_MULTIPLES = 16, {Fp8Recipe.blockwise: 128, Fp8Recipe.mxfp8: 32}


def is_one_engine(group: WorkerGroupConfig) -> TypeGuard[TeacherConfig]:
    """Return whether one vLLM engine takes the place of a group's workers, as only a teacher allows."""
    return isinstance(group, TeacherConfig) and group.scored_by is TeacherScoring.engine


def adapters_of(group: WorkerGroupConfig) -> LoraConfig | None:
    """Return the adapters' keys of a group that trains adapters; None where it trains its whole model, or
    nothing."""
    return group.lora if isinstance(group, TrainedGroupConfig) and group.lora.enabled else None


def recomputes_layers(group: WorkerGroupConfig) -> bool:
    """Return whether the backend of a group that trains computes each layer again in the backward pass."""
    if not isinstance(group, TrainedGroupConfig):
        return False
    own = getattr(group, backend_kind_of(group).part, None)
    is_on: bool = getattr(own, "activation_checkpointing", False)
    return is_on


def replays_routes(group: WorkerGroupConfig) -> bool:
    """Return whether training sends tokens to the experts that the engines chose, in a mixture of experts."""
    return isinstance(group, TrainedGroupConfig) and group.megatron_cfg.router_replay


def parks_optimizer(group: WorkerGroupConfig) -> bool:
    """Return whether the optimizer's state is on the host while the group does not train."""
    return isinstance(group, TrainedGroupConfig) and group.offload_optimizer_for_logprob


def updates_on_host(group: WorkerGroupConfig) -> bool:
    """Return whether the optimizer's state is always on the host, where the CPU updates the weights."""
    return isinstance(group, TrainedGroupConfig) and group.megatron_cfg.optimizer_cpu_offload


def uses_muon(group: WorkerGroupConfig) -> bool:
    """Return whether the group trains the matrices of its layers by Muon."""
    return isinstance(group, TrainedGroupConfig) and group.optimizer.kind is OptimizerKind.muon


def spared_moments(group: WorkerGroupConfig, num_parameters: int) -> int:
    """Return the bytes that Muon's one momentum of so many parameters, all of matrices, spares beside Adam's
    two moments; 0 with AdamW."""
    return FLOAT32 * num_parameters if uses_muon(group) else 0


def stage_size(policy: WorkerGroupConfig) -> int:
    """Return how many ranks one pipeline stage has, TP x CP x DP."""
    return axis_size(policy, "tp") * axis_size(policy, "cp") * policy.data_parallel_size


def policy_world_size(policy: WorkerGroupConfig) -> int:
    """Return the number of a worker group's workers: TP x CP x PP x DP."""
    return stage_size(policy) * axis_size(policy, "pp")


def stage_layers(policy: WorkerGroupConfig, num_layers: int) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage.

    The stages whose numbers the configuration leaves open share the other layers evenly. Raises ValueError
    when they cannot.
    """
    num_stages, megatron = axis_size(policy, "pp"), policy.megatron_cfg
    if num_stages == 1:
        return (num_layers,)
    first, last = megatron.num_layers_in_first_pipeline_stage, megatron.num_layers_in_last_pipeline_stage
    given = [number for number in (first, last) if number is not None]
    left, num_open = num_layers - sum(given), num_stages - len(given)
    if left < 0 or (left % num_open if num_open else left) or (num_open and left < num_open):
        raise ValueError(f"{left} layers cannot be divided over {num_open} stages")
    even = left // num_open if num_open else 0
    middle = (even,) * (num_stages - 2)
    return (even if first is None else first, *middle, even if last is None else last)


def fp8_multiple(group: WorkerGroupConfig) -> int:
    """Return the number of tokens that a rank's products in 8 bits must be a multiple of; 1 without them."""
    if not isinstance(group, TrainedGroupConfig) or group.megatron_cfg.fp8 is None:
        return 1
    return _FP8_MULTIPLES.get(group.megatron_cfg.fp8_recipe, _FP8_MULTIPLE)


def num_chunks(policy: WorkerGroupConfig) -> int:
    """Return how many pieces of the model each pipeline stage has; above 1 the pipeline is interleaved."""
    return policy.megatron_cfg.virtual_pipeline_model_parallel_size or 1


def layers_of_stage(policy: WorkerGroupConfig, num_layers: int, stage: int) -> list[range]:
    """Return the layers of each chunk of a pipeline stage. Raises ValueError as ``stage_layers`` does."""
    sizes, chunks = stage_layers(policy, num_layers), num_chunks(policy)
    if chunks == 1:
        return [range(sum(sizes[:stage]), sum(sizes[: stage + 1]))]
    size = sizes[stage] // chunks
    firsts = [(chunk * len(sizes) + stage) * size for chunk in range(chunks)]
    return [range(first, first + size) for first in firsts]


def length_multiple(policy: WorkerGroupConfig) -> int:
    """Return the number that every sequence's length must be a multiple of.

    Context parallelism cuts a sequence into two pieces for each of its ranks. Sequence parallelism cuts a
    rank's pieces evenly over the TP ranks. Products in 8 bits need a multiple of their own on each rank.
    """
    contexts = axis_size(policy, "cp")
    return (2 * contexts if contexts > 1 else 1) * sequence_parts(policy) * fp8_multiple(policy)


def dynamic_length_multiple(policy: WorkerGroupConfig) -> int:
    """Return the number that the length of every dynamic batch must be a multiple of: ``length_multiple`` and
    ``sequence_length_round`` both divide it."""
    return math.lcm(length_multiple(policy), policy.dynamic_batching.sequence_length_round)


def further_models(teacher: TeacherConfig) -> tuple[str, ...]:
    """Return the checkpoints of a teacher besides ``model_name``, each once."""
    return tuple(model for model in dict.fromkeys(teacher.models.values()) if model != teacher.model_name)


def models_of_samples(cfg: TeacherConfig, batch: KVBatchMeta) -> list[str]:
    """Return the checkpoint that scores each sample; with ``teacher.models`` the batch needs the tag task."""
    if not cfg.models:
        return [cfg.model_name] * len(batch)
    return [cfg.models.get(task, cfg.model_name) for task in batch.tag(TASK)]
