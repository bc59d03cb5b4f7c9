"""Rules on how the policy's work is cut up, whatever the model is."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.errors import Problem
from nemo_like.config.policy_layout import dynamic_length_multiple, length_multiple
from nemo_like.config.schema import Config, DynamicBatchingConfig, PolicyConfig, SequencePackingConfig


def policy_problems(cfg: Config) -> Iterator[Problem]:
    """Everything about the policy that cannot work; its numbers must be in their ranges."""
    yield from _micro_batching(cfg.policy)


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
