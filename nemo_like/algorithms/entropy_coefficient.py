"""The coefficient of the entropy bonus that holds the entropy at a target (Skywork-OR1, arXiv 2505.22312).

    c of the next step = c + delta where the step's entropy is below the target, else c - delta
    the bonus of a step = c x entropy, or 0 where the entropy of the step before was above the target

Standard library only: the driver carries the coefficient from step to step. It is a metric of every step, and
so a part of every checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_like.algorithms.options import LossConfig

COEFFICIENT, ENTROPY = "train/entropy_coef", "train/entropy"  # metrics of a step


@dataclass(frozen=True, slots=True)
class EntropyCoefficient:
    """The coefficient before a step. ``entropy`` is that of the step before, None before the first."""

    value: float
    entropy: float | None = None

    @classmethod
    def at_start(cls, loss: LossConfig, metrics: Mapping[str, float]) -> EntropyCoefficient | None:
        """Return the coefficient of a run's next step; None where ``loss_fn.entropy_coef`` stays.

        ``metrics`` are those of the step before, and empty in a new run.
        """
        if loss.entropy_target is None:
            return None
        begun = cls(metrics.get(COEFFICIENT, loss.entropy_coef or 0.0))
        return begun.after(metrics, loss)

    def after(self, metrics: Mapping[str, float], loss: LossConfig) -> EntropyCoefficient:
        """Return the coefficient after a step with these metrics. A step that did not train leaves it."""
        entropy = metrics.get(ENTROPY)
        if entropy is None or loss.entropy_target is None:
            return self
        moved = self.value + (
            loss.entropy_coef_delta if entropy < loss.entropy_target else -loss.entropy_coef_delta
        )
        return EntropyCoefficient(min(max(moved, loss.entropy_coef_min), loss.entropy_coef_max), entropy)

    def of_step(self, loss: LossConfig) -> float:
        """Return the factor of the entropy in the next step's loss."""
        is_above = self.entropy is not None and self.entropy > (loss.entropy_target or 0.0)
        return 0.0 if is_above else self.value
