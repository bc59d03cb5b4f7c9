"""The reward pipeline on a batch's tags; the arithmetic itself is in ``algorithms``.

    reward ──scale──▶ scaled_reward ──shape──▶ shaped_reward ──estimate──▶ advantage, kl_scale
    sample_mask, outcome ──overlong filter──▶ ──log-prob mismatch──▶ sample_mask, outcome
    advantage, sample_mask ──▶ is_idle

Together these tags are the ledger of a step: what each sample earned, what became of it, and why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, KLToGo
from nemo_like.algorithms.masking import mask_logprob_mismatch, mask_truncated
from nemo_like.algorithms.rewards import Outcome, ResponseEnds, scaled_rewards, shaped_rewards
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.config.loss_rules import is_advantage_alone
from nemo_like.config.schema import GRPOConfig, LossConfig
from nemo_like.policy.interfaces import IS_IDLE, KL_SCALE, KL_SQUARE_SUM, KL_SUM
from nemo_like.rollout.components import COMPONENT_PREFIX


def with_shaped_rewards(batch: KVBatchMeta, cfg: GRPOConfig) -> KVBatchMeta:
    """Adds tags scaled_reward, shaped_reward and outcome to a rollout's batch."""
    scaled = scaled_rewards(batch.numbers("reward"), cfg.reward_scaling)
    ends = ResponseEnds(
        num_response_tokens=batch.numbers("num_response_tokens"), is_truncated=batch.numbers("is_truncated")
    )
    return batch.with_tags(
        scaled_reward=scaled,
        shaped_reward=shaped_rewards(scaled, ends, cfg.reward_shaping),
        outcome=[
            (Outcome.trained if kept else Outcome.reward_failed).value for kept in batch.tag("sample_mask")
        ],
    )


def with_advantages(
    batch: KVBatchMeta,
    estimate: Callable[[AdvantageInputs], Advantages],
    component_names: Sequence[str],
    kl: KLToGo | None = None,
) -> KVBatchMeta:
    """Adds tag advantage, and kl_scale with a KL in the reward."""
    advantages = estimate(
        AdvantageInputs(
            rewards=batch.numbers("shaped_reward"),
            group_ids=batch.tag("group_id"),
            sample_mask=batch.numbers("sample_mask"),
            num_response_tokens=batch.numbers("num_response_tokens"),
            components={name: batch.numbers(COMPONENT_PREFIX + name) for name in component_names},
            kl=kl,
        )
    )
    batch = batch.with_tags(advantage=advantages.per_sample)
    return batch.with_tags(**{KL_SCALE: [advantages.kl_scale] * len(batch)}) if kl else batch


def kl_in_reward(batch: KVBatchMeta, loss: LossConfig) -> KLToGo | None:
    """What scoring found of the KL to the reference, where the reward has it."""
    if not loss.use_kl_in_reward:
        return None
    return KLToGo(
        coefficient=loss.reference_policy_kl_penalty,
        sums=batch.numbers(KL_SUM),
        square_sums=batch.numbers(KL_SQUARE_SUM),
    )


def without_truncated(batch: KVBatchMeta) -> KVBatchMeta:
    """The overlong filter: what ran into a token limit does not train."""
    masked = mask_truncated(batch.numbers("sample_mask"), batch.numbers("is_truncated"))
    return _masked(batch, masked.sample_mask, Outcome.overlong)


def without_mismatch(batch: KVBatchMeta, threshold: float | None) -> KVBatchMeta:
    """The sequence-error mask: what trainer and engine disagree on does not train; None masks nothing."""
    if threshold is None:
        return batch
    masked = mask_logprob_mismatch(batch.numbers("sample_mask"), batch.numbers("mult_prob_error"), threshold)
    return _masked(batch, masked.sample_mask, Outcome.logprob_mismatch)


def with_idle(batch: KVBatchMeta, loss: LossConfig) -> KVBatchMeta:
    """Adds tag is_idle: 1 for samples without a gradient."""
    advantages = batch.numbers("advantage") if is_advantage_alone(loss) else [1.0] * len(batch)
    pairs = zip(advantages, batch.numbers("sample_mask"), strict=True)
    return batch.with_tags(**{IS_IDLE: [float(advantage * kept == 0) for advantage, kept in pairs]})


def with_outcome(batch: KVBatchMeta, outcome: Outcome) -> KVBatchMeta:
    """One outcome for all samples whose reward did not fail."""
    return batch.with_tags(
        outcome=[outcome.value if kept else old for kept, old in _mask_and_outcome(batch)],
    )


def _masked(batch: KVBatchMeta, sample_mask: Sequence[float], why: Outcome) -> KVBatchMeta:
    """The batch with this mask; what it switches off gets ``why`` as its outcome."""
    outcomes = [
        why.value if was_kept and not kept else old
        for (was_kept, old), kept in zip(_mask_and_outcome(batch), sample_mask, strict=True)
    ]
    return batch.with_tags(sample_mask=sample_mask, outcome=outcomes)


def _mask_and_outcome(batch: KVBatchMeta) -> list[tuple[float, str]]:
    return [
        (mask, str(outcome))
        for mask, outcome in zip(batch.numbers("sample_mask"), batch.tag("outcome"), strict=True)
    ]
