"""The interface between a hub's process and its package: prompts, and episodes that take responses. Standard
library only."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol


class HubFailure(Exception):
    """A sample that cannot be judged; ``kind`` is the name of an ``environments.interface.FailureKind``."""

    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(reason)
        self.kind, self.reason = kind, reason


@dataclass(frozen=True)
class HubPrompt:
    """The beginning of an episode: a text, or messages in OpenAI's form."""

    prompt: str | list[dict[str, Any]]
    data: dict[str, Any]  # ``Hub.open`` begins the episode from it; JSON
    answer: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class TurnOutcome:
    """The observation, rewards and metrics that follow a response."""

    observation: str = ""
    # Named components, added up over the turns; None where one abstains.
    rewards: dict[str, float | None] = field(default_factory=dict)
    is_done: bool = False
    metrics: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Episode(Protocol):
    """One episode under way."""

    async def step(self, response: str, is_last: bool) -> TurnOutcome:
        """Take a response; no other follows when it ``is_last``. Raises HubFailure."""

    async def close(self) -> None: ...


class Hub(Protocol):
    """A package's environments, made from the options of the configuration."""

    async def prompts(self, size: int, seed: int) -> list[HubPrompt]:
        """Return ``size`` prompts made from ``seed``, or fewer when there are no more."""

    async def open(self, data: dict[str, Any]) -> Episode:
        """Begin the episode that ``data``, from a ``HubPrompt``, describes."""


def last_match(pattern: str | None, text: str) -> str | None:
    """Return group 1 of the last match, stripped; the whole text without a pattern; None without a match."""
    if pattern is None:
        return text.strip()
    matches = [*re.finditer(pattern, text, re.DOTALL)]
    return matches[-1].group(1).strip() if matches else None


class OwnRandomness:
    """The state of Python's and numpy's global random generators for one episode, separate from other
    episodes."""

    def __init__(self, seed: int) -> None:
        random_before, numpy_before = _states()
        random.seed(seed)
        if (numpy := _numpy()) is not None:
            numpy.random.seed(seed % 2**32)
        self._states = _states()
        _restore(random_before, numpy_before)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Use this episode's state in the block, keep it afterwards, and restore the previous one."""
        before = _states()
        _restore(*self._states)
        try:
            yield
        finally:
            self._states = _states()
            _restore(*before)


def _numpy() -> Any:
    try:
        import numpy
    except ImportError:
        return None
    return numpy


def _states() -> tuple[Any, Any]:
    numpy = _numpy()
    return random.getstate(), None if numpy is None else numpy.random.get_state()


def _restore(of_random: Any, of_numpy: Any) -> None:
    random.setstate(of_random)
    if of_numpy is not None:
        _numpy().random.set_state(of_numpy)
