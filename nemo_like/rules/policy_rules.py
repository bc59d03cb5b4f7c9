"""Rules on how the policy's work is divided over ranks and micro-batches, whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.policy.layout import dynamic_length_multiple, length_multiple
from nemo_like.policy.options import (
    Device,
    DynamicBatchingConfig,
    PolicyBackend,
    PolicyConfig,
    Precision,
    SequencePackingConfig,
)


def policy_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with policy keys that do not fit together.

    The caller has checked that every number of the group policy is in its range.
    """
    yield from _sequence_parallel(cfg.policy)
    yield from _context_parallel(cfg.policy)
    yield from _micro_batching(cfg.policy)
    if cfg.policy.sequence_packing.share_prompts:
        yield from _prompt_sharing(cfg.policy)
        yield from _mixed_groups(cfg)
    yield from _offload(cfg.policy)


def _offload(policy: PolicyConfig) -> Iterator[Problem]:
    is_megatron = policy.backend is PolicyBackend.megatron
    if policy.offload_optimizer_for_logprob and is_megatron and policy.lora.enabled:
        yield Problem(
            key="policy.offload_optimizer_for_logprob=true",
            rule="is not for policy.lora.enabled=true with policy.backend=megatron: the optimizer of "
            "adapters is small and has no weights of its own",
            remedy="set it to false",
        )
    elif policy.offload_optimizer_for_logprob and is_megatron and policy.precision is not Precision.bfloat16:
        yield Problem(
            key="policy.offload_optimizer_for_logprob=true",
            rule="needs policy.precision=bfloat16 with policy.backend=megatron: in float32 the optimizer "
            "has no weights of its own",
            remedy="set it to false",
        )
    for name in ("offload_optimizer_for_logprob", "offload_parameters_between_phases"):
        if getattr(policy, name) and policy.device is not Device.cuda:
            yield Problem(
                key=f"policy.{name}=true",
                rule="needs policy.device=cuda, where there is a host to move to",
                remedy="set it to false",
            )


def _sequence_parallel(policy: PolicyConfig) -> Iterator[Problem]:
    megatron = policy.megatron_cfg
    is_used = policy.backend is PolicyBackend.megatron
    if is_used and megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield Problem(
            key="policy.megatron_cfg.sequence_parallel=true",
            rule="needs policy.megatron_cfg.tensor_model_parallel_size above 1",
            remedy="set it to false",
        )


def _context_parallel(policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem when the longest sample cannot be cut evenly into the parts that ranks get."""
    multiple, length = length_multiple(policy), policy.max_total_sequence_length
    if length % multiple:
        below = length // multiple * multiple
        yield Problem(
            key=f"policy.max_total_sequence_length={length}",
            rule=f"must be a multiple of {multiple}, into which sequence and context parallelism cut it",
            remedy=f"try {below} or {below + multiple}" if below else f"try {multiple}",
        )


def _micro_batching(policy: PolicyConfig) -> Iterator[Problem]:
    packing, dynamic = policy.sequence_packing, policy.dynamic_batching
    if packing.enabled and dynamic.enabled:
        yield Problem(
            key="policy.dynamic_batching.enabled=true",
            rule="excludes policy.sequence_packing.enabled=true: both say how micro-batches are made",
            remedy="set one of them to false; packing wastes the least",
        )
        return
    if packing.enabled:
        yield from _token_budgets("policy.sequence_packing", packing, policy, length_multiple(policy))
    if dynamic.enabled:
        multiple = dynamic_length_multiple(policy)
        yield from _token_budgets("policy.dynamic_batching", dynamic, policy, multiple)


def _prompt_sharing(policy: PolicyConfig) -> Iterator[Problem]:
    key = "policy.sequence_packing.share_prompts=true"
    if not policy.sequence_packing.enabled:
        yield Problem(
            key=key,
            rule="needs policy.sequence_packing.enabled=true: prompts are shared in rows of several samples",
            remedy="set that to true, or this to false",
        )
    if policy.megatron_cfg.context_parallel_size > 1:
        yield Problem(
            key=key,
            rule="needs policy.megatron_cfg.context_parallel_size=1: a prompt that is cut over ranks has no "
            "one place",
            remedy="set it to false; long prompts can be cut or shared",
        )
    if policy.device is Device.cuda and policy.precision is not Precision.bfloat16:
        yield Problem(
            key=key,
            rule="needs policy.precision=bfloat16 with policy.device=cuda, for its attention kernel",
            remedy="set it to false, or policy.precision=bfloat16",
        )


def _mixed_groups(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when no two samples of an update have the same prompt, so that none could be shared."""
    grpo, batch = cfg.grpo, cfg.policy.train_global_batch_size
    if (
        grpo.mix_groups_in_updates
        and grpo.samples_kept_together == 1
        and batch <= grpo.num_prompts_per_step
        and grpo.num_generations_per_prompt > 1
    ):
        yield Problem(
            key="policy.sequence_packing.share_prompts=true",
            rule=f"shares nothing: with grpo.mix_groups_in_updates=true an update of "
            f"policy.train_global_batch_size={batch} samples has one of each prompt",
            remedy="set grpo.samples_kept_together=4 or another number above 1, or this to false",
        )


def _token_budgets(
    key: str, budgets: SequencePackingConfig | DynamicBatchingConfig, policy: PolicyConfig, multiple: int
) -> Iterator[Problem]:
    longest = -(-policy.max_total_sequence_length // multiple) * multiple
    rounded = f", rounded up to a multiple of {multiple}" if multiple > 1 else ""
    for name in ("train_mb_tokens", "logprob_mb_tokens"):
        tokens: int = getattr(budgets, name)
        if tokens < longest:
            yield Problem(
                key=f"{key}.{name}={tokens}",
                rule=f"must hold a sample of policy.max_total_sequence_length="
                f"{policy.max_total_sequence_length} tokens{rounded}",
                remedy=f"try {longest} or more",
            )
