"""What an environment is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from nemo_like.data.interface import Prompt


@dataclass(frozen=True, slots=True)
class Turn:
    """One response of the policy, and what it is judged against."""

    prompt: Prompt
    response: str  # decoded text without the closing eos; other special tokens stay visible
    answer: str  # the dataset's reference answer
    is_truncated: bool  # ran into a token limit, so no eos
    data: Mapping[str, Any] = field(default_factory=dict)  # the example's own, as the dataset gave it


@dataclass(frozen=True, slots=True)
class Feedback:
    """The answer to one turn."""

    rewards: Mapping[str, float]  # named components; their sum is the sample's reward
    observation: str | None = None  # text for the policy's next turn; None when there is nothing to say
    is_done: bool = True
    metrics: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None  # why there is no reward; such a sample must not train

    @classmethod
    def failed(cls, reason: str) -> Feedback:
        """Feedback for a sample that could not be judged."""
        return cls(rewards={}, failure=reason)

    @property
    def reward(self) -> float | None:
        """Sum of the components; None for a failed sample."""
        return None if self.failure is not None else float(sum(self.rewards.values()))


class Environment(Protocol):
    """Judges responses. Keeps nothing between calls: a turn that failed in a batch is asked again alone."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """One feedback per turn, in the order of the turns."""
