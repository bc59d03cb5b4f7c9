"""Notes on what the checks before a run verified, assumed or could not check; ``--dry-run`` prints them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class NoteStatus(Enum):
    """How far the check behind a note went. Notes are printed in this order."""

    checked = "checked"
    assumed = "assumed"
    not_checked = "not checked"


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the user about one thing that was checked, assumed or not checked.

    ``too_long`` has the places of the first prompts that are left out; it is no part of the line.
    """

    status: NoteStatus
    text: str
    too_long: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.status.value:<12} {self.text}"
