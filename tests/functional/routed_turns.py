"""An environment that answers every turn but the last with an observation."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.environments.interface import Feedback, Turn


class Again:
    """Rewards answers that differ, so that every group has something to learn."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [self._feedback(turn) for turn in turns]

    def _feedback(self, turn: Turn) -> Feedback:
        reward = {"varied": (sum(map(ord, turn.response)) % 7) / 7}
        if turn.is_last:
            return Feedback(reward)
        return Feedback(reward, observation="12+34=", is_done=False)
