"""CISPO: the clipped ratio, without gradient, weighs the log-prob."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import ClippedLossConfig

KIND = LossKind(
    about="CISPO: the clipped ratio weighs the log-prob (arXiv 2506.13585)",
    options=ClippedLossConfig,
    function="nemo_like.algorithms.losses:cispo_loss",
    reference="nemo_like.tripwires.reference_loss:weighted_logprob",
    cuts_ratio=True,
)
