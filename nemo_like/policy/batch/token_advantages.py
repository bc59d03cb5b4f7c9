"""Advantages of tokens in training, from the driver's tags of each sample and from columns of each token.

    advantage - kl_scale * K_t + token_scale * column token_advantages

K_t is the KL to go where the reward has a KL term (``reward_kl``). A critic writes the column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import TOKEN_ADVANTAGES
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, TOKEN_SCALE
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.reward_kl import reward_kl


class TokenAdvantages:
    """The advantages of a batch's tokens."""

    def __init__(self, batch: PolicyBatch, loss: LossConfig) -> None:
        self._batch = batch
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
        if self._per_token is None:
            return advantages
        scale, per_token = self._per_token
        gained = values[scale][rows][sample] * per_token[inputs.packed_index]
        return advantages + torch.where(mask > 0, gained, 0.0)
