"""SAPO: a gate that closes softly, in place of PPO's clip."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from nemo_like.algorithms.loss_kind import LossKind
from nemo_like.algorithms.options import LossConfig
from nemo_like.config.keys import Key

_REMEDY = "1.0 for tau_pos and 1.05 for tau_neg are usual; larger values close the gate sooner"


@dataclass(kw_only=True, slots=True)
class SapoConfig(LossConfig):
    """The temperatures of the gate."""

    tau_pos: Annotated[float, Key("where the advantage is above 0", 1.0, above=0, remedy=_REMEDY)]
    tau_neg: Annotated[float, Key("elsewhere", 1.05, above=0, remedy=_REMEDY)]


KIND = LossKind(
    about="SAPO: a gate that closes softly (arXiv 2511.20347)",
    options=SapoConfig,
    function="nemo_like.algorithms.sapo:sapo",
    reference="nemo_like.tripwires.reference_loss:soft_gate",
)
