"""What the checks before a run saw, took for granted or could not see; ``--dry-run`` prints it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Seen(Enum):
    """How much a note is worth."""

    checked = "checked"
    assumed = "assumed"
    not_checked = "not checked"


@dataclass(frozen=True, slots=True)
class Note:
    seen: Seen
    text: str

    def __str__(self) -> str:
        return f"{self.seen.value:<12} {self.text}"
