"""The objective of a critic: values of tokens, and the loss that moves them towards their returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.algorithms.critic import TokenValues, value_loss
from nemo_like.algorithms.losses import GlobalCounts, TokenMean
from nemo_like.batch.columns import RETURNS, VALUES
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import SAMPLE_MASK
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction, Objective
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.options import ValueConfig

# The means that a critic's training reports besides its loss.
VALUE_MEANS = ("mean", "clip_fraction", "error")


@dataclass(frozen=True, slots=True)
class ValueObjective(Objective):
    """The objective of a critic; its loss is the mean over all response tokens of samples that train."""

    cfg: ValueConfig

    @property
    def scoring(self) -> None:
        """None, since a critic's model gives values."""

    @property
    def own_means(self) -> Sequence[str]:
        return VALUE_MEANS

    def loss_of_update(self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics) -> LossFunction:
        """Return the value loss of one optimizer update; the backend calls it once per micro-batch."""
        counts = GlobalCounts(num_tokens=update.num_tokens, num_samples=update.num_samples)

        def loss(outputs: TokenValues, inputs: ModelInputs) -> Tensor:
            values = outputs.values
            mask = batch.sample_values[SAMPLE_MASK.name][inputs.rows][inputs.sample_index]
            # A sample may be masked because one of its rewards failed; nan times a weight of 0 is still nan.
            current = values.detach()
            old = torch.where(mask > 0, batch.columns[VALUES.name][inputs.packed_index], current)
            returns = torch.where(mask > 0, batch.columns[RETURNS.name][inputs.packed_index], current)
            terms = value_loss(values, old, returns, clip_range=self.cfg.clip_range)
            total = (counts.token_shares(mask) * terms.per_token).sum()
            metrics.add_loss(total)
            metrics.add_means(
                {
                    "mean": TokenMean(current, mask),
                    "clip_fraction": TokenMean(terms.is_clipped, mask),
                    "error": TokenMean((current - returns).abs(), mask),
                }
            )
            return total

        return loss
