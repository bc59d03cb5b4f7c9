"""The stages of a step that compute on a batch's tags alone; the arithmetic itself is in ``algorithms``.

    reward ──scale──▶ scaled_reward ──shape──▶ shaped_reward
    is_judged ──▶ sample_mask, outcome
    sample_mask, outcome ──overlong filter──▶ ──log-prob mismatch──▶ sample_mask, outcome
    shaped_reward, sample_mask ──estimate──▶ advantage, kl_scale
    advantage, sample_mask ──▶ is_idle

Together these tags are the ledger of a step: each sample's reward, its outcome, and the reason. One further
function says after which steps the driver validates.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from nemo_like.algorithms.entropy_coefficient import EntropyCoefficient
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, KLToGo, TokenSums
from nemo_like.algorithms.loss_traits import is_advantage_alone
from nemo_like.algorithms.options import GRPOConfig, LossConfig, RewardShapingConfig
from nemo_like.algorithms.rewards import (
    Outcome,
    ResponseEnds,
    has_overlong_penalty,
    scaled_rewards,
    shaped_rewards,
)
from nemo_like.algorithms.sample_filters import mask_logprob_mismatch, mask_truncated
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    ADVANTAGE,
    ADVANTAGE_DIGEST,
    ENTROPY_COEF,
    GROUP_ID,
    IS_IDLE,
    IS_JUDGED,
    IS_TRUNCATED,
    KL_SCALE,
    KL_SQUARE_SUM,
    KL_SUM,
    LIKELIHOOD_WEIGHT,
    MAX_RESPONSE_TOKENS,
    MULT_PROB_ERROR,
    NUM_RESPONSE_TOKENS,
    OUTCOME,
    REWARD,
    SAMPLE_DIGEST,
    SAMPLE_MASK,
    SCALED_REWARD,
    SHAPED_REWARD,
    TOKEN_ADVANTAGE_SQUARE_SUM,
    TOKEN_ADVANTAGE_SUM,
    TOKEN_SCALE,
    reward_component,
)
from nemo_like.driver.run_failures import RunFailed
from nemo_like.tripwires.advantage_digests import advantage_digests


def with_shaped_rewards(batch: KVBatchMeta, cfg: GRPOConfig) -> KVBatchMeta:
    """Return a rollout's batch with the tags scaled_reward, shaped_reward, sample_mask and outcome.

    From here on every judged sample trains, until a later stage masks it.
    """
    scaled = scaled_rewards(batch.tag(REWARD), cfg.reward_scaling)
    num_tokens, is_truncated = batch.tag(NUM_RESPONSE_TOKENS), batch.tag(IS_TRUNCATED)
    ends = ResponseEnds(
        num_response_tokens=num_tokens,
        is_truncated=is_truncated,
        max_response_tokens=_response_limits(batch, cfg.reward_shaping),
    )
    is_judged = batch.tag(IS_JUDGED)
    outcomes = [(Outcome.trained if judged else Outcome.reward_failed).value for judged in is_judged]
    shaped = shaped_rewards(scaled, ends, cfg.reward_shaping)
    batch = batch.with_tag(SCALED_REWARD, scaled).with_tag(SHAPED_REWARD, shaped)
    return batch.with_tag(SAMPLE_MASK, [*map(float, is_judged)]).with_tag(OUTCOME, outcomes)


def _response_limits(batch: KVBatchMeta, cfg: RewardShapingConfig) -> Sequence[float]:
    """Return for each sample the response length that gets the full overlong penalty: the configured one, or
    the most that the sample's limits allowed."""
    if not has_overlong_penalty(cfg):
        return [0] * len(batch)  # not read
    if cfg.max_response_length is not None:
        return [cfg.max_response_length] * len(batch)
    if not batch.has_tag(MAX_RESPONSE_TOKENS):
        raise RunFailed(
            "grpo.reward_shaping.max_response_length=null takes each sample's own limit, which the replayed "
            f"recording does not have as the tag {MAX_RESPONSE_TOKENS.name}; set it to a number of tokens"
        )
    return batch.tag(MAX_RESPONSE_TOKENS)


def compared_rewards(batch: KVBatchMeta, cfg: GRPOConfig) -> Sequence[float]:
    """Return the values by which dynamic sampling compares the samples of a group: raw rewards, or a part of
    them; NaN where that part abstains.

    Raises RunFailed when no sample has the part.
    """
    if cfg.dynamic_sampling_component is None:
        return batch.tag(REWARD)
    tag = reward_component(cfg.dynamic_sampling_component)
    if not batch.has_tag(tag):
        known = sorted(name.removeprefix("reward/") for name in batch.tags if name.startswith("reward/"))
        raise RunFailed(
            f"grpo.dynamic_sampling_component={cfg.dynamic_sampling_component} is no part of the reward of "
            f"any sample at {batch.occasion}; there are {', '.join(known) or 'none'}"
        )
    return batch.tag(tag)


def with_advantages(
    batch: KVBatchMeta,
    estimate: Callable[[AdvantageInputs], Advantages],
    component_names: Sequence[str],
    kl: KLToGo | None = None,
    of_tokens: TokenSums | None = None,
    tags: Mapping[str, Sequence[Any]] = MappingProxyType({}),
) -> KVBatchMeta:
    """Return the batch with the tag advantage, with kl_scale when the reward has a KL term, and with
    token_scale when there is a critic.

    ``component_names`` are the reward components that ``estimate`` needs, and ``tags`` has the values of
    further tags that it reads, by name; ``kl`` is None without a KL term, ``of_tokens`` without a critic.
    """
    num_tokens = batch.tag(NUM_RESPONSE_TOKENS)
    advantages = estimate(
        AdvantageInputs(
            rewards=batch.tag(SHAPED_REWARD),
            group_ids=batch.tag(GROUP_ID),
            sample_mask=batch.tag(SAMPLE_MASK),
            num_response_tokens=num_tokens,
            components={name: batch.tag(reward_component(name)) for name in component_names},
            kl=kl,
            of_tokens=of_tokens,
            tags=tags,
        )
    )
    batch = batch.with_tag(ADVANTAGE, advantages.per_sample)
    if batch.has_tag(SAMPLE_DIGEST):
        digests = advantage_digests(batch.tag(SAMPLE_DIGEST), advantages.per_sample)
        batch = batch.with_tag(ADVANTAGE_DIGEST, digests)
    if advantages.token_scale is not None:
        return batch.with_tag(TOKEN_SCALE, [advantages.token_scale] * len(batch))
    return batch.with_tag(KL_SCALE, [advantages.kl_scale] * len(batch)) if kl else batch


def kl_in_reward(batch: KVBatchMeta, loss: LossConfig) -> KLToGo | None:
    """Return the KL to the reference policy, from the tags of scoring; None when the reward has no KL
    term."""
    if not loss.use_kl_in_reward:
        return None
    return KLToGo(
        coefficient=loss.reference_policy_kl_penalty,
        sums=batch.tag(KL_SUM),
        square_sums=batch.tag(KL_SQUARE_SUM),
    )


def token_sums(batch: KVBatchMeta) -> TokenSums | None:
    """Return the sums of the tokens' own advantages, from the tags of a critic; None without a critic."""
    if not batch.has_tag(TOKEN_ADVANTAGE_SUM):
        return None
    return TokenSums(sums=batch.tag(TOKEN_ADVANTAGE_SUM), square_sums=batch.tag(TOKEN_ADVANTAGE_SQUARE_SUM))


def mean_advantages(batch: KVBatchMeta) -> Sequence[float]:
    """Return each sample's advantage; with a critic, the mean over its response tokens, 0 without any."""
    if not batch.has_tag(TOKEN_SCALE):
        return batch.tag(ADVANTAGE)
    columns = (batch.tag(tag) for tag in (ADVANTAGE, TOKEN_SCALE, TOKEN_ADVANTAGE_SUM, NUM_RESPONSE_TOKENS))
    return [
        shift + scale * total / count if count else 0.0
        for shift, scale, total, count in zip(*columns, strict=True)
    ]


def with_likelihood_weights(
    batch: KVBatchMeta, loss: LossConfig, *, solved_reward: float, update_size: int
) -> KVBatchMeta:
    """Return the batch, in the order of its updates, with the tag likelihood_weight where the loss has a
    likelihood term: ``loss_fn.positive_example_nll_weight`` / the tokens of the right answers of the update.

    An answer is right with a raw reward of at least ``solved_reward``. Others, and those that do not train,
    have 0.
    """
    mu = loss.positive_example_nll_weight
    if not mu:
        return batch
    tokens, rewards, kept = batch.tag(NUM_RESPONSE_TOKENS), batch.tag(REWARD), batch.tag(SAMPLE_MASK)
    is_right = [bool(one) and reward >= solved_reward for reward, one in zip(rewards, kept, strict=True)]
    weights: list[float] = []
    for start in range(0, len(batch), update_size):
        update = range(start, min(start + update_size, len(batch)))
        total = sum(tokens[i] for i in update if is_right[i])
        weights += [mu / total if is_right[i] and total else 0.0 for i in update]
    return batch.with_tag(LIKELIHOOD_WEIGHT, weights)


def with_entropy_coefficient(
    batch: KVBatchMeta, coefficient: EntropyCoefficient | None, loss: LossConfig
) -> KVBatchMeta:
    """Return the batch with the tag entropy_coef where ``coefficient`` moves from step to step."""
    if coefficient is None:
        return batch
    return batch.with_tag(ENTROPY_COEF, [coefficient.of_step(loss)] * len(batch))


def without_truncated(batch: KVBatchMeta) -> KVBatchMeta:
    """Return the batch with samples masked that ran into a token limit: the overlong filter."""
    is_truncated = batch.tag(IS_TRUNCATED)
    new = mask_truncated(batch.tag(SAMPLE_MASK), is_truncated)
    return masked(batch, new.sample_mask, Outcome.overlong)


def without_mismatch(batch: KVBatchMeta, threshold: float | None) -> KVBatchMeta:
    """Return the batch with samples masked on whose log-probs trainer and engine disagree.

    They disagree when mult_prob_error is above ``threshold`` or is not a number; None masks nothing.
    """
    if threshold is None:
        return batch
    new = mask_logprob_mismatch(batch.tag(SAMPLE_MASK), batch.tag(MULT_PROB_ERROR), threshold)
    return masked(batch, new.sample_mask, Outcome.logprob_mismatch)


def with_idle(batch: KVBatchMeta, loss: LossConfig) -> KVBatchMeta:
    """Return the batch with the tag is_idle: true for samples that add nothing to the gradient.

    These are the masked samples and, if the loss has no term besides the advantage's, the samples whose
    advantage is 0.
    """
    advantages = batch.tag(ADVANTAGE) if is_advantage_alone(loss) else [1.0] * len(batch)
    pairs = zip(advantages, batch.tag(SAMPLE_MASK), strict=True)
    return batch.with_tag(IS_IDLE, [advantage * kept == 0 for advantage, kept in pairs])


def with_outcome(batch: KVBatchMeta, outcome: Outcome) -> KVBatchMeta:
    """Return the batch with this outcome for all samples that are not masked; masked samples keep theirs."""
    outcomes = [
        outcome.value if kept else old
        for kept, old in zip(batch.tag(SAMPLE_MASK), batch.tag(OUTCOME), strict=True)
    ]
    return batch.with_tag(OUTCOME, outcomes)


def masked(batch: KVBatchMeta, sample_mask: Sequence[float], why: Outcome) -> KVBatchMeta:
    """Return the batch with this mask, and ``why`` as the outcome of every sample that it newly masks."""
    outcomes = [
        why.value if was_kept and not kept else old
        for was_kept, kept, old in zip(batch.tag(SAMPLE_MASK), sample_mask, batch.tag(OUTCOME), strict=True)
    ]
    return batch.with_tag(SAMPLE_MASK, sample_mask).with_tag(OUTCOME, outcomes)


def validates_after(step: int, cfg: GRPOConfig) -> bool:
    """Return whether to validate after step ``step`` (counted from 1; 0 is before the first)."""
    if step == 0:
        return cfg.val_at_start
    if step == cfg.max_num_steps and cfg.val_at_end:
        return True
    return cfg.val_period > 0 and step % cfg.val_period == 0 and step >= cfg.val_start_at
