"""Writes and reads ``events.jsonl``: what a run tells its user besides its metrics.

Each line has a time, a kind, a text, and for some kinds a step or an exit code:

    {"exit_code": null, "kind": "status", "step": null, "text": "starting Ray", "time": "2026-03-01T..."}

Every process of a run that is continued appends to the same file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum
from pathlib import Path
from typing import Any

from nemo_like.config.secrets import masked
from nemo_like.observability.disk import append_whole


class EventKind(Enum):
    status = "status"  # the text says what the run does outside of steps
    note = "note"  # a line that stays, such as a warning
    step = "step"  # metrics.jsonl has this step
    ended = "ended"  # the text completes the sentence "The run ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a run told its user, ``time_s`` seconds after 1970 by the driver machine's clock."""

    time_s: float  # since 1970
    kind: EventKind
    text: str = ""
    step: int | None = None
    exit_code: int | None = None  # of run_grpo.py, with ``ended``; None where the process was cut short

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Event:
        """Return the event of a parsed line. Raises KeyError, TypeError or ValueError for other objects."""
        return cls(
            time_s=datetime.fromisoformat(value["time"]).timestamp(),
            kind=EventKind(value["kind"]),
            text=value["text"],
            step=value["step"],
            exit_code=value["exit_code"],
        )


class EventsFile:
    """Appends to an ``events.jsonl``. A failed write does not end the run; ``problem`` then says why."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.problem: str | None = None  # why the file lacks the latest events

    def write(
        self, kind: EventKind, text: str = "", *, step: int | None = None, exit_code: int | None = None
    ) -> None:
        """Append an event with the present time. Any thread may call this."""
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        event = {"time": now, "kind": kind.value, "text": masked(text), "step": step, "exit_code": exit_code}
        try:
            with self._path.open("ab", buffering=0) as file:
                append_whole(file, json.dumps(event, sort_keys=True).encode() + b"\n")
        except OSError as error:
            self.problem = self.problem or f"{self._path} lacks the run's latest events: {error}"
