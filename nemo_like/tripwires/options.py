"""The keys of checks that look for bugs, ``debug``."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Annotated

from nemo_like.config.keys import Key


class Tripwires(Enum):
    """Which checks of every step look for bugs that raise nothing (docs/explanation/tripwires.md)."""

    off = "off"
    cheap = "cheap"  # those that cost at most a hundredth of a step
    all = "all"


@dataclass(kw_only=True, slots=True)
class DebugConfig:
    """Checks that look for mistakes which raise no error and spoil what is trained;
    docs/explanation/tripwires.md."""

    tripwires: Annotated[
        Tripwires,
        Key(
            "off: none; cheap: those that cost at most a hundredth of a step; all: also the expensive ones. "
            "In a file off needs quotes: without them YAML reads a boolean.",
            Tripwires.cheap,
        ),
    ]
    find_mismatch: Annotated[
        bool,
        Key(
            "when engines and trainer disagree, compare them module by module; the alarm then names the "
            "module that differs",
            True,
        ),
    ]
