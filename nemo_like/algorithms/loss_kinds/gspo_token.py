"""GSPO-token: clipped by the ratio of the sample, with a gradient for each token."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import SurrogateLossConfig

KIND = LossKind(
    about="GSPO-token: GSPO with a gradient per token (arXiv 2507.18071)",
    options=SurrogateLossConfig,
    function="nemo_like.algorithms.gspo_token:gspo_token",
    reference="nemo_like.tripwires.reference_loss:clipped_surrogate",
    has_sample_ratio=True,
    cuts_ratio=True,
)
