"""Dynamic loss scaling for float16, whose gradients would vanish below 6e-8 and overflow above 65504.

    loss x scale ──▶ backward ──▶ gradients, summed over ranks ──▶ / scale ──▶ finite: update
                                                                         └──▶ else: none, and a lower scale

The scale moves as that of Megatron-core's ``DynamicGradScaler`` does. That class is not used itself: in a
chain of optimizers each has its own, which judges the gradients of dense layers or those of experts alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.policy.options import LossScalingConfig, Precision, TrainedGroupConfig

_FACTOR = 2.0


class LossScaler:
    """The scale of a worker group's loss. All ranks of a world move it alike."""

    def __init__(self, cfg: LossScalingConfig) -> None:
        self._cfg, self.scale = cfg, cfg.initial_loss_scale
        self.skipped_in_a_row = 0  # updates up to now
        self._finite_in_a_row, self._spared = 0, cfg.hysteresis

    def unscale(self, gradients: Sequence[Tensor], device: torch.device) -> bool:
        """Divide this rank's gradients by the scale, in place, and move the scale; return whether the
        gradients of all ranks are finite. Every rank of the world calls this; ``device`` is that of its
        collectives."""
        found = torch.zeros(1, device=gradients[0].device if gradients else device)
        if gradients:
            inverse = torch.full_like(found, 1 / self.scale)
            torch._amp_foreach_non_finite_check_and_unscale_(list(gradients), found, inverse)
        everywhere = found.to(device)
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        is_finite = not everywhere.item()
        self.move(is_finite=is_finite)
        return is_finite

    def move(self, *, is_finite: bool) -> None:
        """Move the scale after an update whose gradients were all finite, or were not."""
        if not is_finite:
            self._finite_in_a_row, self._spared = 0, self._spared - 1
            self.skipped_in_a_row += 1
            if self._spared <= 0:
                self.scale = max(self.scale / _FACTOR, self._cfg.min_loss_scale)
            return
        self._finite_in_a_row, self.skipped_in_a_row = self._finite_in_a_row + 1, 0
        if self._finite_in_a_row == self._cfg.loss_scale_window:
            self._finite_in_a_row, self._spared = 0, self._cfg.hysteresis
            self.scale *= _FACTOR

    def state(self) -> dict[str, float]:
        """Return the numbers by which a resumed run continues, by their names in a checkpoint."""
        return {
            "loss_scale": self.scale,
            "loss_scale_finite": self._finite_in_a_row,
            "loss_scale_spared": self._spared,
            "loss_scale_skipped": self.skipped_in_a_row,
        }

    def restore(self, state: Mapping[str, float]) -> None:
        """Continue with what ``state`` returned; the checkpoint of another precision changes nothing."""
        if self.state().keys() <= state.keys():
            self.scale = float(state["loss_scale"])
            self._finite_in_a_row = int(state["loss_scale_finite"])
            self._spared = int(state["loss_scale_spared"])
            self.skipped_in_a_row = int(state["loss_scale_skipped"])


def loss_scaler(cfg: TrainedGroupConfig) -> LossScaler | None:
    """Return the scaler of a worker group; None where its precision needs none."""
    return LossScaler(cfg.loss_scaling) if cfg.precision is Precision.float16 else None
