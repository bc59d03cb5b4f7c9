"""Which prompts come next. Standard library only: the driver owns it, and it carries indices alone."""

from __future__ import annotations

import random
from typing import TypedDict


class SamplerState(TypedDict):
    """Enough to continue with the very next prompt."""

    num_prompts: int
    seed: int
    shuffle: bool
    epoch: int
    offset: int  # prompts of this epoch already handed out


class PromptSampler:
    """Hands out prompt indices epoch after epoch, each epoch in an order of its own, fixed by the seed.

    A request may span two epochs; nothing is skipped and nothing is dropped.
    """

    def __init__(self, num_prompts: int, seed: int, shuffle: bool) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts} must be at least 1; is the training dataset empty?")
        self._num_prompts = num_prompts
        self._seed = seed
        self._shuffle = shuffle
        self._start_epoch(0)

    @property
    def epoch(self) -> int:
        """The epoch that the next prompt belongs to, from 0."""
        return self._epoch

    def next(self, count: int) -> tuple[int, ...]:
        """The next ``count`` indices into the dataset."""
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
        return SamplerState(
            num_prompts=self._num_prompts,
            seed=self._seed,
            shuffle=self._shuffle,
            epoch=self._epoch,
            offset=self._offset,
        )

    def load_state_dict(self, state: SamplerState) -> None:
        """Continue where ``state`` was taken.

        Raises ValueError when it belongs to another dataset size, seed or shuffle setting, since
        the order would then be another one.
        """
        own = self.state_dict()
        for key in ("num_prompts", "seed", "shuffle"):
            if state[key] != own[key]:
                raise ValueError(
                    f"the saved prompt order has {key}={state[key]!r}, this run {own[key]!r}; "
                    "resume with the data and the seed that the checkpoint was made with"
                )
        self._start_epoch(state["epoch"])
        self._offset = state["offset"]

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch
        self._offset = 0
        self._order = list(range(self._num_prompts))
        if self._shuffle:
            random.Random(f"{self._seed}/{epoch}").shuffle(self._order)
