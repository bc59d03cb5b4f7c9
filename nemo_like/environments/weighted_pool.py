"""The rollout's handle of a weighted sum: several environments judge each turn.

turns ──▶ the pool of each component, in batches of its own size ──▶ weighted rewards, one per component

A component keeps its own actors, deadlines and concurrency, and may judge for several sums, and by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.pool import EnvironmentPool
from nemo_like.environments.registry import component_weights
from nemo_like.environments.weighted_feedback import weighted_feedback


@dataclass(frozen=True, slots=True)
class Component:
    """An environment that judges for a weighted sum."""

    pool: EnvironmentPool
    weight: float
    batch_size: int  # turns of one call


class WeightedPool:
    """Adds up the rewards that several environments give to each turn."""

    def __init__(self, components: Mapping[str, Component]) -> None:
        """Ask the environments of these names, whose pools are managed elsewhere."""
        self._components = dict(components)

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""
        return any(component.pool.wants_tokens for component in self._components.values())

    @property
    def unanswered(self) -> list[str]:
        """The names of the actors that have an unanswered call."""
        return [actor for component in self._components.values() for actor in component.pool.unanswered]

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, in order; a failed one when a component fails."""
        answers = await asyncio.gather(*(_asked(one, turns) for one in self._components.values()))
        weights = {name: component.weight for name, component in self._components.items()}
        return [weighted_feedback(turn, weights, given) for turn, *given in zip(turns, *answers, strict=True)]


def weighted_pools(
    env: Mapping[str, EnvConfig], pools: Mapping[str, EnvironmentPool]
) -> dict[str, WeightedPool]:
    """Return the pool of each weighted sum in ``env`` whose components all have ``pools``."""
    weights = {name: component_weights(cfg) for name, cfg in env.items()}
    return {
        name: WeightedPool(
            {one: Component(pools[one], weight, env[one].batch_size) for one, weight in of.items()}
        )
        for name, of in weights.items()
        if of and of.keys() <= pools.keys()
    }


async def _asked(component: Component, turns: Sequence[Turn]) -> list[Feedback]:
    size = component.batch_size
    starts = range(0, len(turns), size)
    answers = await asyncio.gather(*(component.pool.step(turns[start : start + size]) for start in starts))
    return [feedback for answer in answers for feedback in answer]
