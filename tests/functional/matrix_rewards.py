"""Rewards by which nearly every group has a gradient, whatever the model can do."""

from __future__ import annotations

import zlib

from nemo_like.environments.interface import Feedback, Turn


def varied(turn: Turn) -> float:
    """One of five rewards, by a hash of prompt and response."""
    return zlib.crc32(f"{turn.prompt}{turn.response}".encode()) % 5 / 4


def two_turns(turn: Turn) -> Feedback:
    """The first response is asked about again, unless a limit lets no turn follow."""
    if turn.is_last or turn.history:
        return Feedback({"varied": varied(turn)})
    return Feedback({"varied": varied(turn)}, observation="1+1=", is_done=False)
