"""Training metrics, summed over micro-batches and kept on the device until the end of the phase."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from nemo_like.algorithms.divergence import DIVERGENCES
from nemo_like.algorithms.losses import LossTerms, TokenMean
from nemo_like.observability.metrics import Metric, maximum, mean, minimum

# Means that a training phase can report; the loss decides which of them it reports.
KNOWN_MEANS = (
    *("probs_ratio", "probs_ratio_clamped", "clip_fraction_low", "clip_fraction_high"),
    *("kl_penalty", "entropy", "is_oob_ratio", "off_policy_masked", *DIVERGENCES),
)


class TrainMetrics:
    """One replica's part of a training phase's metrics; the parts of all replicas merge into global figures.

    Only the last pipeline stage fills ``tensors``; the other stages must receive them before they call
    ``result``. Means over tokens are over the tokens of samples that train. In means over updates each
    replica has a weight of 1 / num_replicas per update, so that the merged weight is the number of updates.
    """

    def __init__(self, device: torch.device, num_replicas: int, own_means: Sequence[str] = ()) -> None:
        """Start with empty sums. ``own_means`` names the objective's means besides KNOWN_MEANS."""
        self._num_replicas = num_replicas
        self._names = (*KNOWN_MEANS, *own_means)
        self._indexes = {name: index for index, name in enumerate(self._names)}
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        # For each mean: the weighted sum of its values, and the sum of the weights.
        self._sums = torch.zeros(len(self._names), 2, dtype=torch.float64, device=device)
        # The largest ratio, -ratio, clipped ratio and -clipped ratio.
        self._extremes = torch.full((4,), -torch.inf, dtype=torch.float32, device=device)
        self._grad_norms: list[float] = []
        self._learning_rate: float | None = None  # of the latest update
        self._num_skipped = 0  # updates whose gradients overflowed
        self._loss_scale: tuple[float, int] | None = None  # in float16: the scale, and skipped in a row

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self._loss, self._sums, self._extremes

    @property
    def num_updates(self) -> int:
        """The number of recorded updates."""
        return len(self._grad_norms)

    @torch.no_grad()
    def add_micro_batch(self, terms: LossTerms, mask: Tensor) -> None:
        """Add one micro-batch's loss and means; ``mask`` [M] float32 is 1 on tokens of samples that train."""
        self.add_loss(terms.loss)
        self.add_means(
            {
                "probs_ratio": TokenMean(terms.ratio, mask),
                "probs_ratio_clamped": TokenMean(terms.clipped_ratio, mask),
                **terms.means,
            }
        )
        if len(mask):
            largest = torch.stack((terms.ratio, -terms.ratio, terms.clipped_ratio, -terms.clipped_ratio))
            bounds = largest.masked_fill(mask == 0, -torch.inf).amax(dim=1)
            torch.maximum(self._extremes, bounds, out=self._extremes)

    @torch.no_grad()
    def add_loss(self, loss: Tensor) -> None:
        """Add one micro-batch's part of the loss."""
        self._loss += loss.detach()

    @torch.no_grad()
    def scale_loss(self, factor: float) -> None:
        """Multiply the sum of the loss so far by ``factor``.

        Means and extremes do not depend on the counts by which the loss is normalised.
        """
        self._loss *= factor

    @torch.no_grad()
    def add_means(self, means: Mapping[str, TokenMean]) -> None:
        """Add one micro-batch's part of each named mean. Values on tokens of weight 0 must be finite."""
        values = torch.stack([part.values for part in means.values()])
        weights = torch.stack([part.weights for part in means.values()])
        sums = torch.stack(((values * weights).sum(dim=1), weights.sum(dim=1)), dim=1)
        self._sums[[self._indexes[name] for name in means]] += sums

    def add_update(self, *, grad_norm: float, learning_rate: float) -> None:
        """Record one optimizer update, with its gradient norm before clipping."""
        self._grad_norms.append(grad_norm)
        self._learning_rate = learning_rate

    def add_skipped_update(self) -> None:
        """Record an update that was not made, since its gradients overflowed."""
        self._num_skipped += 1

    def set_loss_scale(self, scale: float, skipped_in_a_row: int) -> None:
        """Record the scale of float16 after an update, and how many updates up to it were skipped."""
        self._loss_scale = scale, skipped_in_a_row

    def result(self) -> dict[str, Metric]:
        """Return the metrics by name, without a prefix. Means without any weight are left out."""
        share = 1 / self._num_replicas
        metrics = {"loss": mean(self._loss.item(), (self.num_updates + self._num_skipped) * share)}
        if self._learning_rate is not None:
            metrics["grad_norm"] = mean(sum(self._grad_norms) * share, self.num_updates * share)
            metrics["lr"] = maximum(self._learning_rate)  # the same on all replicas
        if self._loss_scale is not None:
            scale, skipped_in_a_row = self._loss_scale
            metrics |= {
                "loss_scale": maximum(scale),
                "skipped_updates": maximum(self._num_skipped),
                "skipped_in_a_row": maximum(skipped_in_a_row),
            }
        for name, (total, weight) in zip(self._names, self._sums.tolist(), strict=True):
            if weight:
                metrics[name] = mean(total, weight)
        ratio_max, ratio_min, clipped_max, clipped_min = self._extremes.tolist()
        if ratio_max > -torch.inf:
            metrics |= {
                "probs_ratio_max": maximum(ratio_max),
                "probs_ratio_min": minimum(-ratio_min),
                "probs_ratio_clamped_max": maximum(clipped_max),
                "probs_ratio_clamped_min": minimum(-clipped_min),
            }
        return metrics
