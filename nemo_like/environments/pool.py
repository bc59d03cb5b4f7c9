"""The rollout's handle of the actors of one environment."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from nemo_like.batch.columnar import Columnar
from nemo_like.batch.columns import Column, Layout
from nemo_like.cluster.actors import ActorHandle
from nemo_like.environments.interface import Feedback, Turn, conversation_of


class EnvironmentPool:
    """Spreads calls over an environment's actors. Each call goes to the actor with the fewest unanswered
    turns, or, if actors keep episodes, to the actor that has the conversation's episode."""

    def __init__(self, actors: Sequence[ActorHandle], *, keeps_episodes: bool = False) -> None:
        self._actors, self._keeps_episodes = tuple(actors), keeps_episodes
        self._num_unanswered = [0] * len(self._actors)
        self.columns: tuple[Column, ...] = ()  # that feedback may bring; known once ``meet`` has returned

    def move_to(self, actors: Sequence[ActorHandle]) -> None:
        """Call these actors from now on; they host the same environment as the previous ones."""
        self._actors, self._num_unanswered = tuple(actors), [0] * len(actors)

    async def meet(self) -> None:
        """Ask the first actor which columns the environment declares. Raises the errors of its start."""
        self.columns = await self._actors[0].submit("columns")

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""
        return any(column.layout is Layout.per_token for column in self.columns)

    @property
    def unanswered(self) -> list[str]:
        """The names of the actors that have an unanswered call."""
        pairs = zip(self._actors, self._num_unanswered, strict=True)
        return [actor.name for actor, num_turns in pairs if num_turns]

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, in order; see ``EnvironmentServer.step``."""
        if not self._keeps_episodes:
            return await self._asked(self._num_unanswered.index(min(self._num_unanswered)), turns)
        places: dict[int, list[int]] = {}
        for place, turn in enumerate(turns):
            places.setdefault(conversation_of(turn.number) % len(self._actors), []).append(place)
        answers = await asyncio.gather(
            *(self._asked(index, [turns[place] for place in of]) for index, of in places.items())
        )
        feedback = {
            place: one
            for of, answer in zip(places.values(), answers, strict=True)
            for place, one in zip(of, answer, strict=True)
        }
        return [feedback[place] for place in range(len(turns))]

    async def _asked(self, index: int, turns: Sequence[Turn]) -> list[Feedback]:
        self._num_unanswered[index] += len(turns)
        try:
            return await self._actors[index].submit("step", Columnar(turns))
        finally:
            self._num_unanswered[index] -= len(turns)
