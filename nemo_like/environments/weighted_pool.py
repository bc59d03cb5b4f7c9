"""The rollout's handle of a weighted sum: several environments judge each turn.

turns ──▶ the pool of each component, in batches of its own size ──▶ weighted rewards, one per component

A component keeps its own actors, deadlines and concurrency, and may judge for several sums, and by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Failure, FailureKind, Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.pool import EnvironmentPool
from nemo_like.environments.registry import component_weights


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
        return [self._sum(turn, given) for turn, *given in zip(turns, *answers, strict=True)]

    def _sum(self, turn: Turn, given: Sequence[Feedback]) -> Feedback:
        """Return the weighted sum of the components' feedback to a turn; ``given`` is in the order of the
        components.

        Each component's reward, times its weight, becomes a component of the sum under its name. The parts of
        that reward before the weight, and the component's own metrics, become metrics with its name in front.
        A component that abstains is left out; when all do, the sum has no reward.
        """
        rewards: dict[str, float | None] = {}
        metrics: dict[str, float] = {}
        columns: dict[str, Any] = {}
        # An answer to another turn keeps that turn's number, so that the caller notices it.
        others = (one.turn_number for one in given if one.turn_number != turn.number)
        turn_number = max(others, default=turn.number)
        for (name, component), one in zip(self._components.items(), given, strict=True):
            if one.failure is not None and one.failure.kind is FailureKind.abstained:
                rewards[name] = None
                continue
            if (failure := _failure(name, one)) is not None:
                return Feedback(failure=failure, turn_number=turn_number)
            rewards[name] = component.weight * (one.reward or 0.0)
            metrics |= {
                f"{name}/reward/{part}": value for part, value in one.rewards.items() if value is not None
            }
            metrics |= {f"{name}/{metric}": value for metric, value in one.metrics.items()}
            columns |= one.columns
        # A large weight may lead beyond float32; and all components may abstain.
        if (failure := checked(Feedback(rewards)).failure) is not None:
            return Feedback(failure=failure, turn_number=turn_number)
        return Feedback(rewards, metrics=metrics, columns=columns, turn_number=turn_number)


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


def _failure(name: str, feedback: Feedback) -> Failure | None:
    """Return why a component's feedback cannot be added to others; None when it can."""
    if feedback.failure is not None:
        return Failure(feedback.failure.kind, f"component {name}: {feedback.failure.reason}")
    if not feedback.is_done:
        return Failure(
            FailureKind.malformed,
            f"component {name}: it answers the response, and a weighted sum has no further turn",
        )
    return None
