"""The frames that pass between an environment's process and its parent: pickles after their lengths."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

from nemo_like.batch.columns import Column

LENGTH_BYTES = 8


@dataclass(frozen=True, slots=True)
class Ready:
    """The environment was built, and its feedback may bring these columns."""

    columns: tuple[Column, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """The environment could not be built."""

    message: str


@dataclass(frozen=True, slots=True)
class CallRaised:
    """A call failed: the environment raised, or what it answered could not be passed on."""

    message: str


def frame(content: Any) -> bytes:
    """Return the pickle of ``content`` after its length, an unsigned big-endian integer."""
    pickled = pickle.dumps(content)
    return len(pickled).to_bytes(LENGTH_BYTES, "big") + pickled
