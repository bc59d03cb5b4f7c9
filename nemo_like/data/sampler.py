"""Samplers that choose which prompts come next. The driver owns one, and sees only prompt indices.

Standard library only.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from fractions import Fraction
from typing import NotRequired, TypedDict


class SamplerState(TypedDict):
    """The state of a ``PromptSampler`` in a checkpoint, from which it continues with the very next prompt."""

    num_prompts: int
    seed: int
    shuffle: bool
    epoch: int
    offset: int  # prompts of this epoch already handed out
    source: NotRequired[int]  # its number in a mixture, where that is not 0


class PromptSampler:
    """Hands out prompt indices epoch after epoch; with ``shuffle`` the seed gives each epoch an order.

    Every epoch has each prompt once. A request may span several epochs. ``source`` is the sampler's number in
    a mixture, whose sources have different orders.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool, source: int = 0) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts} must be at least 1; is the training dataset empty?")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._source = source
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""
        return self._epoch

    @property
    def num_taken(self) -> int:
        """The number of prompts handed out so far, over all epochs."""
        return self._epoch * self._num_prompts + self._offset

    def next(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` indices into the dataset. Raises ValueError when ``count`` is below 1."""
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        taken: list[int] = []
        while len(taken) < count:
            part = self._order[self._offset : self._offset + count - len(taken)]
            taken.extend(part)
            self._offset += len(part)
            if self._offset == self._num_prompts:
                self._start_epoch(self._epoch + 1)
        return tuple(taken)

    def state_dict(self) -> SamplerState:
        state = SamplerState(
            num_prompts=self._num_prompts,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=self._epoch,
            offset=self._offset,
        )
        if self._source:
            state["source"] = self._source
        return state

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue from ``state``.

        A state without the number of its source is from an older mixture, all of whose sources had the order
        of the first; it is continued in that order. Raises ValueError when the state was saved with another
        dataset size, seed or shuffle setting, which give another order.
        """
        own = self.state_dict()
        for key in ("num_prompts", "seed", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the saved prompt order has {key}={state[key]!r}, this run {own[key]!r}; "
                    "resume with the data and the seed that the checkpoint was made with"
                )
        self._source = state.get("source", 0)
        self._start_epoch(state["epoch"])
        self._offset = state["offset"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._offset = 0
        self._order = list(range(self._num_prompts))
        if self._shuffle:
            source = f"/{self._source}" if self._source else ""
            random.Random(f"{self._seed}/{epoch}{source}").shuffle(self._order)


class MixtureState(TypedDict):
    """The state of a ``MixtureSampler`` in a checkpoint; sources are in the order of the configuration."""

    weights: list[float]
    sources: list[SamplerState]


class MixtureSampler:
    """Hands out prompt indices of several sources by weight; each source has a ``PromptSampler``.

    The next prompt comes from the source that is furthest behind its share, so that the prompts handed out so
    far stay close to the weights. Indices count through all sources: a source begins at the sum of the sizes
    before it. A single source gives the order of its ``PromptSampler``.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float], seed: int, shuffle: bool) -> None:
        """Start before the first prompt. Raises ValueError unless each source has a weight above 0."""
        if not sizes or len(sizes) != len(weights) or not all(weight > 0 for weight in weights):
            raise ValueError(f"{len(sizes)} sources with the weights {list(weights)}: each needs one above 0")
        self._weights = list(weights)
        self._samplers = [PromptSampler(size, seed, shuffle, source) for source, size in enumerate(sizes)]
        self._starts = list(itertools.accumulate(sizes, initial=0))[:-1]

    @property
    def epoch(self) -> int:
        """The number of complete passes over every source."""
        return min(sampler.epoch for sampler in self._samplers)

    def next(self, count: int) -> tuple[int, ...]:
        """Return the next ``count`` indices. Raises ValueError when ``count`` is below 1."""
        if count < 1:
            raise ValueError(f"count={count} must be at least 1")
        return tuple(self._next_one() for _ in range(count))

    def state_dict(self) -> MixtureState:
        return MixtureState(
            weights=list(self._weights), sources=[sampler.state_dict() for sampler in self._samplers]
        )

    def load_state_dict(self, state: MixtureState) -> None:
        """Continue from ``state``.

        Raises ValueError when it was saved with other sources, weights, seed or shuffle setting.
        """
        if len(state["sources"]) != len(self._samplers) or state["weights"] != self._weights:
            raise ValueError(
                f"the saved prompt order mixes {len(state['sources'])} sources with the weights "
                f"{state['weights']}, this run {len(self._samplers)} with {self._weights}; "
                "resume with the data that the checkpoint was made with"
            )
        for sampler, saved in zip(self._samplers, state["sources"], strict=True):
            sampler.load_state_dict(saved)

    def _next_one(self) -> int:
        taken = [sampler.num_taken for sampler in self._samplers]
        total_weight, position = sum(self._weights), sum(taken) + 1
        behind = [
            position * weight / total_weight - count
            for weight, count in zip(self._weights, taken, strict=True)
        ]
        source = behind.index(max(behind))
        return self._starts[source] + self._samplers[source].next(1)[0]


def steps_within_epochs(
    num_epochs: float, sizes: Sequence[int], weights: Sequence[float], prompts_per_step: int
) -> int:
    """Return how many steps a ``MixtureSampler`` of these sources serves within ``num_epochs`` passes over
    the source that it passes last.

    Steps run on from one epoch into the next; a last one that would begin a further pass is not counted.
    """
    shares = [Fraction(str(weight)) for weight in weights]
    prompts_of_a_pass = max(size * sum(shares) / share for size, share in zip(sizes, shares, strict=True))
    return int(Fraction(str(num_epochs)) * prompts_of_a_pass / prompts_per_step)
