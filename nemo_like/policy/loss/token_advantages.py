"""Advantages of tokens in training, from the driver's tags of each sample and from columns of each token.

    advantage - kl_scale * K_t + token_scale * column token_advantages

Tokens of responses of a wrong form have the loss's penalty instead, by column message_flags. A critic writes
the column token_advantages. K_t is the KL to the reference as a part of the reward, token by token
(REINFORCE++, arXiv 2501.03262):

    scoring     K_t per token ──▶ its sum and sum of squares per sample, as tags
    driver      rewards and these sums ──▶ advantage per sample, kl_scale
    training    advantage - kl_scale * K_t per token

The two sums let the driver whiten advantages over tokens that it never sees.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.algorithms.loss_traits import punishes_messages
from nemo_like.algorithms.losses import kl_to_go, kl_to_reference
from nemo_like.algorithms.message_penalties import with_penalties
from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import (
    MESSAGE_FLAGS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    TOKEN_ADVANTAGES,
)
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, KL_SQUARE_SUM, KL_SUM, TOKEN_SCALE
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch


class TokenAdvantages:
    """The advantages of a batch's tokens."""

    def __init__(self, batch: PolicyBatch, loss: LossConfig) -> None:
        self._batch, self._loss = batch, loss
        self._per_token: tuple[str, Tensor] | None = None  # the tag of its scale, and its packed values
        if TOKEN_ADVANTAGES in batch:
            self._per_token = TOKEN_SCALE.name, batch.columns[TOKEN_ADVANTAGES.name]
        elif loss.use_kl_in_reward:
            self._per_token = KL_SCALE.name, -reward_kl(batch, loss.reference_policy_kl_type)

    def at(self, inputs: ModelInputs, mask: Tensor) -> Tensor:
        """Return the advantages of a micro-batch's scored tokens, [M] float32.

        ``mask`` [M] is 0 on tokens of samples that do not train, whose columns may hold nan.
        """
        values, rows, sample = self._batch.sample_values, inputs.rows, inputs.sample_index
        advantages = values[ADVANTAGE.name][rows][sample]
        if self._per_token is not None:
            scale, per_token = self._per_token
            gained = values[scale][rows][sample] * per_token[inputs.packed_index]
            advantages = advantages + torch.where(mask > 0, gained, 0.0)
        if punishes_messages(self._loss):
            flags = self._batch.columns[MESSAGE_FLAGS.name][inputs.packed_index]
            advantages = with_penalties(advantages, flags, self._loss)
        return advantages


def reward_kl(batch: PolicyBatch, kind: KLType) -> Tensor:
    """Compute K_t: KL(prev || reference) summed over response token t and the response tokens after it in its
    token run.

    The result is packed [sum of lengths] float32, in nats, 0 where no response token follows; it is on the
    batch's device and has no gradient.
    """
    prev, reference = batch.columns[PREV_LOGPROBS.name], batch.columns[REFERENCE_LOGPROBS.name]
    mask = batch.columns[RESPONSE_MASK.name].to(prev.device)
    kl = kl_to_reference(prev, reference, kind)
    return kl_to_go(kl.masked_fill(mask == 0, 0.0), batch.runs.lengths.to(prev.device))


def reward_kl_tags(batch: PolicyBatch, kind: KLType) -> dict[str, list[float]]:
    """Compute tags kl_to_go_sum and kl_to_go_square_sum: the sums of K_t and of its square over each sample's
    response tokens."""
    mask = batch.columns[RESPONSE_MASK.name]
    to_go = reward_kl(batch, kind).cpu().double().masked_fill(mask == 0, 0.0)
    return {
        KL_SUM.name: batch.sum_per_sample(to_go).tolist(),
        KL_SQUARE_SUM.name: batch.sum_per_sample(to_go.square()).tolist(),
    }
