"""Writes the tables of the pages docs/reference/from_*.md, as Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import groupby

from nemo_like.config.other_frameworks import Always, Entry, Framework, Missing, NoEffect, our_keys

# A reason of so many keys stands above the tables once.
_OFTEN = 4


def table(framework: Framework) -> str:
    """Return every key of a framework with its counterpart here, one table for each group of keys.

    A reason that many keys share stands above the tables once, with a number that the tables repeat.
    """
    lines: list[str] = []
    has_groups = any("." in key for key in framework.keys)

    def group_of(row: tuple[str, Entry]) -> str:
        return row[0].partition(".")[0] if has_groups else ""

    rows = [*framework.keys.items(), *((f"{group}.*", entry) for group, entry in framework.rest.items())]
    notes = _numbered(entry for _, entry in rows)
    lines += [line for reason, number in notes.items() for line in ("", f"({number}) {reason}.")]
    for group, of_group in groupby(sorted(rows, key=group_of), group_of):
        lines += ["", f"### {group}"] if group else []
        lines += ["", f"| {framework.name} | here | |", "|---|---|---|"]
        lines += [line for key, entry in of_group for line in _rows(key, entry, notes)]
    return "\n".join(lines).strip()


def _numbered(entries: Iterator[Entry]) -> dict[str, int]:
    """Number the reasons that many keys without a counterpart have, in the order of the first of each."""
    counts = Counter(_without_counterpart(entry)[1] for entry in entries if not _leads_somewhere(entry))
    often = [reason for reason, count in counts.items() if count >= _OFTEN]
    return {reason: number for number, reason in enumerate(often, 1)}


def _leads_somewhere(entry: Entry) -> bool:
    return isinstance(entry, str) or bool(our_keys(entry))


def _rows(key: str, entry: Entry, notes: Mapping[str, int]) -> Iterator[str]:
    """Yield a line for each key here to which an entry leads, or one line for an entry that leads to none."""
    if isinstance(entry, str):
        yield f"| `{key}` | `{entry}` | |"
    elif ends := our_keys(entry):
        for index, end in enumerate(ends):
            name, how = "" if index else f" `{key}`", f" {end.how}" if end.how else ""
            yield f"|{name} | `{end.key}` |{how} |"
    else:
        kind, why = _without_counterpart(entry)
        yield f"| `{key}` | {kind} | {f'({notes[why]})' if why in notes else why} |"


def _without_counterpart(entry: Entry) -> tuple[str, str]:
    assert isinstance(entry, Always | NoEffect | Missing)
    if isinstance(entry, Always):
        return "always " + " or ".join(f"`{value}`" for value in entry.values), entry.why
    return ("no effect" if isinstance(entry, NoEffect) else "missing"), entry.why
