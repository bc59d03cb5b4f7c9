"""GSPO: PPO's clipped surrogate with the geometric mean of a sample's ratios."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import SurrogateLossConfig

KIND = LossKind(
    about="GSPO: one ratio per sample (arXiv 2507.18071)",
    options=SurrogateLossConfig,
    function="nemo_like.algorithms.losses:policy_gradient",
    reference="nemo_like.tripwires.reference_loss:clipped_surrogate",
    has_sample_ratio=True,
    spreads_gradient=True,
    cuts_ratio=True,
)
