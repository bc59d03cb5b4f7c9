"""Reward 1 for exactly the reference answer, properly ended; 0 for anything else."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_like.environments.interface import Feedback, Turn


class ArithmeticEnvironment:
    """A response that ran into its token limit earns nothing, whatever it says."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [Feedback(rewards={"exact_match": float(_is_correct(turn))}) for turn in turns]


def _is_correct(turn: Turn) -> bool:
    return not turn.is_truncated and turn.response == turn.answer
