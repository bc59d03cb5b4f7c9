"""``Alarm``: what a tripwire reports when it finds something wrong. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """What one tripwire found wrong in one step."""

    tripwire: str  # its name in docs/explanation/tripwires.md
    wrong: str  # what was seen, and what is allowed
    look_at: str  # where the cause may be
    ends_run: bool = True  # false: a warning, since the run may be right all the same


def alarm_message(alarms: Sequence[Alarm], step: int) -> str:
    """Return one message with all alarms of a step, one per line."""
    lines = [f"tripwire {one.tripwire!r}: {one.wrong}; look at {one.look_at}" for one in alarms]
    return f"at step {step}, " + "\n".join(lines)
