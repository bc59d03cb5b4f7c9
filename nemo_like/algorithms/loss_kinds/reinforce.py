"""REINFORCE: neither ratio nor clipping."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import LossConfig

KIND = LossKind(
    about="REINFORCE: -A log p, with neither ratio nor clipping",
    options=LossConfig,
    function="nemo_like.algorithms.losses:reinforce_loss",
    reference="nemo_like.tripwires.reference_loss:plain_logprob",
)
