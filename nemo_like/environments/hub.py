"""Environments from packages that offer many: Gymnasium, TextArena, OpenEnv and verifiers.

A package runs in its own process, with its own interpreter if its requirements conflict with those of this
project (``options.python``). An episode stays in that process between its turns; the ``state`` that travels
with the conversation is only the episode's name. A process that does not have the episode plays it again from
its history.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Sequence

from nemo_like.child_process.parent_side import ChildDied
from nemo_like.environments.hub_process import HubCallFailed, HubProcess
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.shared_options import EPISODE_KEY, HubOptions


class HubEnvironment:
    """Plays the episodes of one hub side by side."""

    def __init__(self, options: HubOptions) -> None:
        """Start the package's process. Raises HubRefused when it cannot be loaded or refuses its options."""
        self._process = HubProcess(options)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order."""
        return list(await asyncio.gather(*(self._played(turn) for turn in turns)))

    async def _played(self, turn: Turn) -> Feedback:
        episode = turn.state or uuid.uuid4().hex
        try:
            outcome = await self._process.call(
                "step",
                episode=episode,
                data=turn.data[EPISODE_KEY],
                history=[(one.response, one.observation) for one in turn.history],
                response=turn.response,
                is_last=turn.is_last,
            )
        except HubCallFailed as error:
            return Feedback(failure=error.failure)
        except ChildDied:
            # The environment's server replaces this process too, and asks about each turn alone, and so finds
            # the turn that ended the package.
            os._exit(1)
        return Feedback(
            outcome["rewards"],
            observation=outcome["observation"],
            is_done=outcome["is_done"],
            metrics=outcome["metrics"],
            state=episode,
        )
