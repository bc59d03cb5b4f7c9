"""An environment that answers every response, whatever it says, with the result of a tool."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from nemo_like.environments.interface import Feedback, Turn

RESULT = "42"


class Answering:
    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [_answered(turn) for turn in turns]


def _answered(turn: Turn) -> Feedback:
    rewards = {"varied": zlib.crc32(turn.response.encode()) % 5 / 4}
    return Feedback(rewards) if turn.is_last else Feedback(rewards, observation=RESULT, is_done=False)
