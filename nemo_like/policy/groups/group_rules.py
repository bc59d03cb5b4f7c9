"""Rules on how a worker group's work is divided over ranks and micro-batches, whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config.problems import Problem
from nemo_like.policy.groups.layout import (
    dynamic_length_multiple,
    fp8_multiple,
    length_multiple,
    parks_optimizer,
)
from nemo_like.policy.groups.training_rules import loss_scaling_problems, muon_problems
from nemo_like.policy.options import (
    Device,
    DynamicBatchingConfig,
    ScoringBatchesConfig,
    ScoringPackingConfig,
    SequencePackingConfig,
    TrainedGroupConfig,
    WorkerGroupConfig,
)

_FP8_CUT = "which products in 8 bits, and what cuts sequences over ranks, need"


def group_problems(name: str, group: WorkerGroupConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield every problem of keys of the worker group ``name`` that contradict each other.

    The caller has checked that every number of the group is within its limits.
    """
    yield from _context_parallel(name, group)
    yield from _micro_batching(name, group)
    if group.sequence_packing.share_prompts:
        yield from _prompt_sharing(name, group)
        if isinstance(group, TrainedGroupConfig):
            yield from _mixed_groups(name, group, grpo)
    yield from _offload(name, group)
    if isinstance(group, TrainedGroupConfig):
        yield from loss_scaling_problems(name, group)
        yield from muon_problems(name, group)


def _offload(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    moved = {
        "offload_optimizer_for_logprob": parks_optimizer(group),
        "offload_parameters_between_phases": group.offload_parameters_between_phases,
    }
    for key, is_moved in moved.items():
        if is_moved and group.device is not Device.cuda:
            yield Problem(
                key=f"{name}.{key}=true",
                rule=f"needs {name}.device=cuda, where there is a host to move to",
                remedy="set it to false",
            )


def _context_parallel(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem when the longest sample cannot be cut evenly over the ranks that share it."""
    multiple, length = length_multiple(group), group.max_total_sequence_length
    if length % multiple:
        below = length // multiple * multiple
        yield Problem(
            key=f"{name}.max_total_sequence_length={length}",
            rule=f"must be a multiple of {multiple}, "
            + (
                "into which sequence and context parallelism cut it" if fp8_multiple(group) == 1 else _FP8_CUT
            ),
            remedy=f"try {below} or {below + multiple}" if below else f"try {multiple}",
        )


def _micro_batching(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    packing, dynamic = group.sequence_packing, group.dynamic_batching
    if packing.enabled and dynamic.enabled:
        yield Problem(
            key=f"{name}.dynamic_batching.enabled=true",
            rule=f"excludes {name}.sequence_packing.enabled=true: both say how micro-batches are made",
            remedy="set one of them to false; packing wastes the least",
        )
        return
    if packing.enabled:
        yield from _token_budgets(name, "sequence_packing", packing, group, length_multiple(group))
    if dynamic.enabled:
        multiple = dynamic_length_multiple(group)
        yield from _token_budgets(name, "dynamic_batching", dynamic, group, multiple)


def _prompt_sharing(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    key = f"{name}.sequence_packing.share_prompts=true"
    if not group.sequence_packing.enabled:
        yield Problem(
            key=key,
            rule=f"needs {name}.sequence_packing.enabled=true: prompts are shared in rows of several samples",
            remedy="set that to true, or this to false",
        )


def _mixed_groups(name: str, group: TrainedGroupConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem when no two samples of an update have the same prompt, so that no prompt can be
    shared."""
    batch = group.train_global_batch_size
    if (
        grpo.mix_groups_in_updates
        and grpo.samples_kept_together == 1
        and batch <= grpo.step_shape.num_prompts
        and grpo.step_shape.num_generations > 1
    ):
        yield Problem(
            key=f"{name}.sequence_packing.share_prompts=true",
            rule=f"shares nothing: with grpo.mix_groups_in_updates=true an update of "
            f"{name}.train_global_batch_size={batch} samples has one of each prompt",
            remedy="set grpo.samples_kept_together=4 or another number above 1, or this to false",
        )


def _token_budgets(
    name: str,
    batching: str,
    budgets: ScoringPackingConfig | ScoringBatchesConfig,
    group: WorkerGroupConfig,
    multiple: int,
) -> Iterator[Problem]:
    longest = -(-group.max_total_sequence_length // multiple) * multiple
    rounded = f", rounded up to a multiple of {multiple}" if multiple > 1 else ""
    limits = {"logprob_mb_tokens": budgets.logprob_mb_tokens}
    if isinstance(budgets, SequencePackingConfig | DynamicBatchingConfig):
        limits = {"train_mb_tokens": budgets.train_mb_tokens, **limits}
    for key, tokens in limits.items():
        if tokens < longest:
            yield Problem(
                key=f"{name}.{batching}.{key}={tokens}",
                rule=f"must hold a sample of {name}.max_total_sequence_length="
                f"{group.max_total_sequence_length} tokens{rounded}",
                remedy=f"try {longest} or more",
            )
