"""The tables of the pages docs/from_*.md, as Markdown."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from nemo_like.config.frameworks.entries import Always, Entry, Framework, Missing, NoEffect, heres


def table(framework: Framework) -> str:
    """Return every key of a framework with what it is here, one table for each of its groups."""
    lines: list[str] = []
    rows = [*framework.keys.items(), *((f"{group}.*", entry) for group, entry in framework.rest.items())]
    for group, of_group in groupby(sorted(rows, key=lambda row: _group(row[0])), lambda row: _group(row[0])):
        lines += ["", f"### {group}"] if group else []
        lines += ["", f"| {framework.name} | here | |", "|---|---|---|"]
        lines += [line for key, entry in of_group for line in _rows(key, entry)]
    return "\n".join(lines).strip()


def _group(key: str) -> str:
    return key.partition(".")[0] if "." in key else ""


def _rows(key: str, entry: Entry) -> Iterator[str]:
    """Yield a line for each key that an entry leads to, and one for an entry that leads nowhere."""
    if isinstance(entry, str):
        yield f"| `{key}` | `{entry}` | |"
    elif ends := heres(entry):
        for end in ends:
            how = f" {end.how} " if end.how else " "
            yield f"| `{key}` | `{end.key}` |{how}|"
            key = ""
    else:
        kind, why = _without_counterpart(entry)
        yield f"| `{key}` | {kind} | {why} |"


def _without_counterpart(entry: Entry) -> tuple[str, str]:
    assert isinstance(entry, Always | NoEffect | Missing)
    if isinstance(entry, Always):
        return "always " + " or ".join(f"`{value}`" for value in entry.values), entry.why
    return ("no effect" if isinstance(entry, NoEffect) else "missing"), entry.why
