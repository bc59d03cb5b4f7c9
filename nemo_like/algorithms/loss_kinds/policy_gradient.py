"""PPO's clipped surrogate: the loss of GRPO."""

from __future__ import annotations

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import SurrogateLossConfig

KIND = LossKind(
    about="PPO's clipped surrogate (arXiv 1707.06347)",
    options=SurrogateLossConfig,
    function="nemo_like.algorithms.losses:policy_gradient",
    reference="nemo_like.tripwires.reference_loss:clipped_surrogate",
    cuts_ratio=True,
)
