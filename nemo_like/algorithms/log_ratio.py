"""The limit of every difference of log-probs that becomes a ratio of probabilities."""

from __future__ import annotations

from torch import Tensor

# Nats, as in verl. exp(88) is the last in float32, and infinity times an advantage of 0 is no number.
LIMIT = 20.0


def limited(log_ratio: Tensor) -> Tensor:
    """Return ``log_ratio`` limited to +-20, any shape; where the limit holds nothing flows."""
    return log_ratio.clamp(-LIMIT, LIMIT)
