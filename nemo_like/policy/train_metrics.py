"""Sums over micro-batches of what training reports, kept on the device until the end of the phase."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.algorithms.losses import LossTerms
from nemo_like.observability.metrics import Metric, maximum, mean, minimum


class TrainMetrics:
    """One replica's part of a training phase; parts of all replicas merge into the global figures.

    ``tensors`` are filled on the last pipeline stage only; the other stages receive them before
    ``result``. Means over tokens count the tokens of samples that train. Means over updates give each
    replica a weight of 1 / num_replicas, so that the merged weight is the number of updates.
    """

    def __init__(self, device: torch.device, num_replicas: int) -> None:
        self._num_replicas = num_replicas
        # loss, tokens, and over these tokens: ratio, clipped ratio, kl
        self._sums = torch.zeros(5, dtype=torch.float64, device=device)
        # largest of: ratio, -ratio, clipped ratio, -clipped ratio
        self._extremes = torch.full((4,), -torch.inf, dtype=torch.float32, device=device)
        self._grad_norms: list[float] = []
        self._learning_rates: list[float] = []

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        return self._sums, self._extremes

    @torch.no_grad()
    def add_micro_batch(self, terms: LossTerms, mask: Tensor) -> None:
        """``mask`` [M] float32 is 1 on tokens of samples that train."""
        per_token = torch.stack((torch.ones_like(mask), terms.ratio, terms.clipped_ratio, terms.kl))
        self._sums[0] += terms.loss.detach()
        self._sums[1:] += per_token @ mask
        if len(mask):
            ratios = per_token[1:3].masked_fill(mask == 0, torch.nan)
            smallest, largest = -ratios, ratios
            bounds = (
                torch.stack((largest, smallest), dim=1).flatten(0, 1).nan_to_num(nan=-torch.inf).amax(dim=1)
            )
            torch.maximum(self._extremes, bounds, out=self._extremes)

    def add_update(self, *, grad_norm: float, learning_rate: float) -> None:
        """One optimizer update is done."""
        self._grad_norms.append(grad_norm)
        self._learning_rates.append(learning_rate)

    def result(self) -> dict[str, Metric]:
        """The metrics by name, without a prefix."""
        loss, num_tokens, ratio, clipped_ratio, kl = self._sums.tolist()
        share = 1 / self._num_replicas
        updates = len(self._grad_norms) * share
        metrics = {
            "loss": mean(loss, updates),
            "grad_norm": mean(sum(self._grad_norms) * share, updates),
            "lr": mean(sum(self._learning_rates) * share, updates),
            "probs_ratio": mean(ratio, num_tokens),
            "probs_ratio_clamped": mean(clipped_ratio, num_tokens),
            "kl_penalty": mean(kl, num_tokens),
        }
        if num_tokens:
            ratio_max, ratio_min, clipped_max, clipped_min = self._extremes.tolist()
            metrics |= {
                "probs_ratio_max": maximum(ratio_max),
                "probs_ratio_min": minimum(-ratio_min),
                "probs_ratio_clamped_max": maximum(clipped_max),
                "probs_ratio_clamped_min": minimum(-clipped_min),
            }
        return metrics
