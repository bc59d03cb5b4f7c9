"""Reads what a run directory says of the run as a whole: how it goes, on which host, with which software."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from nemo_like.driver import exit_codes
from nemo_like.observability.events import Event, EventKind
from nemo_like.observability.jsonl import FollowedLines, json_object
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.run_lock import all_starts

_STATUSES = {
    exit_codes.FINISHED: "finished",
    exit_codes.PREEMPTED: "stopped",
    exit_codes.INTERRUPTED: "stopped",
}


def run_state(directory: RunDirectory) -> dict[str, Any]:
    """Return the run's ``status`` (running, finished, stopped, failed, died or unknown), its ``outcome`` in
    words, when it ``began``, its ``seconds``, ``starts`` and ``process``, and its ``software``.

    What the directory does not say is None. A run that is continued has the seconds of all its starts.
    """
    starts = all_starts(directory.path)
    events = [*_events(directory)]
    software = _object(directory.software_path)
    state: dict[str, Any] = {"status": "unknown", "outcome": None, "began": None, "seconds": None}
    state |= {"starts": len(starts), "process": None, "software": software}
    if not starts:
        return state
    latest = starts[-1]
    of_latest = [event for event in events if event.time_s >= latest.began_s]
    ended = next((event for event in reversed(of_latest) if event.kind is EventKind.ended), None)
    last_s = max([latest.last_sign_s, *(event.time_s for event in of_latest)])
    last_s = last_s if ended is None else ended.time_s
    earlier_s = sum(start.last_sign_s - start.began_s for start in starts[:-1])
    state |= {"process": latest.process, "began": starts[0].began_s}
    state["seconds"] = round(earlier_s + max(0.0, last_s - latest.began_s))
    if ended is not None:
        code = exit_codes.FAILED if ended.exit_code is None else ended.exit_code
        return state | {"status": _STATUSES.get(code, "failed"), "outcome": ended.text}
    if not latest.is_over:
        return state | {"status": "running"}
    how = "ended without a word on how it went" if latest.has_ended else "left no last word"
    return state | {"status": "died", "outcome": how}


def run_configuration(directory: RunDirectory) -> dict[str, Any] | None:
    """Return the resolved configuration as one value per dotted key; None where the directory has none.

    Lists stay whole, since their entries have no keys.
    """
    try:
        value = yaml.safe_load(directory.config_path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    return dict(_flat(value)) if isinstance(value, dict) else None


def evaluated_groups(directory: RunDirectory) -> list[Any] | None:
    """Return the groups of an evaluation's results; None for a run that trains."""
    groups = (_object(directory.evaluation_path) or {}).get("groups")
    return groups if isinstance(groups, list) else None


def _flat(value: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, each in value.items():
        if isinstance(each, dict) and each:
            yield from _flat(each, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", each


def _object(path: Path) -> dict[str, Any] | None:
    try:
        return json_object(path.read_bytes())
    except OSError:
        return None


def _events(directory: RunDirectory) -> Iterator[Event]:
    for value in FollowedLines(directory.events_path).new().values:
        try:
            yield Event.from_json(value)
        except (KeyError, TypeError, ValueError):
            continue  # of another version
