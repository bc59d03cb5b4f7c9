"""What passes between an environment's process and its parent: pickles, each with its length before it."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from nemo_like.batch.columns import Column

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment is there, and its feedback may bring these columns."""

    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The environment could not be built."""

    message: str


@dataclass(frozen=True, slots=True)
class CallRaised:
    """A call raised."""

    message: str


def frame(content: Any) -> bytes:
    """Length and pickle."""
    pickled = pickle.dumps(content)
    return len(pickled).to_bytes(LENGTH_BYTES, "big") + pickled
