"""An environment that answers with pictures, and a loss that reads the whole conversation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from PIL import Image

from nemo_like.algorithms.losses import LossTerms, LossTokens
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import MESSAGES, reads
from nemo_like.environments.interface import Feedback, Turn
from tests.losses import clipped_loss

NO_PICTURE, MISSING = 3, "/no/such/picture.png"


class Looking:
    """Answers with a picture of ``height`` pixels, up to twice, and judges one response of three at once.

    One response of ``missing_of`` gets a picture that is not there. Rewards vary within a group. When it is
    first asked it removes the file ``removes``.
    """

    def __init__(self, height: int = 28, missing_of: int = 0, removes: str | None = None) -> None:
        self._height, self._missing_of, self._removes = height, missing_of, removes

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        if self._removes is not None:
            Path(self._removes).unlink(missing_ok=True)
        return [self._feedback(turn) for turn in turns]

    def _feedback(self, turn: Turn) -> Feedback:
        number = sum(map(ord, turn.response))
        if turn.is_last or number % NO_PICTURE == 0:
            return Feedback({"varied": float(number % 5)})
        if self._missing_of and number % self._missing_of == 1:
            return Feedback(observation="=", images=MISSING, is_done=False)
        height = turn.data.get("height", self._height)
        picture = Image.new("RGB", (56, height), (number % 256, 0, 255))
        parts = [{"type": "text", "text": "="}, {"type": "image", "image": picture}]
        return Feedback(observation=parts, is_done=False)


@reads(MESSAGES)
def as_said(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """The usual loss, for samples whose conversation ends with what the policy said."""
    for messages in tokens.columns[MESSAGES.name]:
        assert messages is None or messages[-1]["role"] == "assistant"
    return clipped_loss(tokens, cfg)
