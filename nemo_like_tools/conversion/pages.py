"""Writes the tables of the pages docs/reference/from_*.md, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from nemo_like.config.other_frameworks import Always, Entry, Framework, Missing, NoEffect, heres


def table(framework: Framework) -> str:
    """Return every key of a framework with its counterpart here, one table for each group of keys."""
    lines: list[str] = []
    has_groups = any("." in key for key in framework.keys)

    def group_of(row: tuple[str, Entry]) -> str:
        return row[0].partition(".")[0] if has_groups else ""

    rows = [*framework.keys.items(), *((f"{group}.*", entry) for group, entry in framework.rest.items())]
    for group, of_group in groupby(sorted(rows, key=group_of), group_of):
        lines += ["", f"### {group}"] if group else []
        lines += ["", f"| {framework.name} | here | |", "|---|---|---|"]
        lines += [line for key, entry in of_group for line in _rows(key, entry)]
    return "\n".join(lines).strip()


def _rows(key: str, entry: Entry) -> Iterator[str]:
    """Yield a line for each key here to which an entry leads, or one line for an entry that leads to none."""
    if isinstance(entry, str):
        yield f"| `{key}` | `{entry}` | |"
    elif ends := heres(entry):
        for index, end in enumerate(ends):
            name, how = "" if index else f" `{key}`", f" {end.how}" if end.how else ""
            yield f"|{name} | `{end.key}` |{how} |"
    else:
        kind, why = _without_counterpart(entry)
        yield f"| `{key}` | {kind} | {why} |"


def _without_counterpart(entry: Entry) -> tuple[str, str]:
    assert isinstance(entry, Always | NoEffect | Missing)
    if isinstance(entry, Always):
        return "always " + " or ".join(f"`{value}`" for value in entry.values), entry.why
    return ("no effect" if isinstance(entry, NoEffect) else "missing"), entry.why
