"""Looks up what each metric means in the tables of docs/reference/metrics.md and metrics_speed.md.

A heading such as ``## train/`` is the prefix of the names in the tables below it; a name may hold
placeholders, as in ``env/<name>/reward``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

_HEADING = re.compile(r"## (?P<prefix>\w+/)?")
_ROW = re.compile(r"\| (?P<names>`.+?`) \| (?P<meaning>.+) \|")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_VALIDATION = "validation/"
_PLACEHOLDER = re.compile(r"<\w+>")


def meaning_of(metric: str) -> str | None:
    """Return what a metric means, in plain text; None when the documentation does not list it."""
    return next((meaning for pattern, meaning in _meanings() if pattern.fullmatch(metric)), None)


def with_meanings(metrics: Iterable[str]) -> dict[str, str | None]:
    """Return the meanings of metrics, sorted first by the pages' headings and then by name."""
    headings = list(dict.fromkeys(name.partition("/")[0] for name, _ in _rows(_text())))
    order = {heading: index for index, heading in enumerate(headings)}
    ordered = sorted(metrics, key=lambda name: (order.get(name.partition("/")[0], len(order)), name))
    return {name: meaning_of(name) for name in ordered}


def metrics_page() -> Path:
    """Return the path of docs/reference/metrics.md."""
    return Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


@cache
def _meanings() -> list[tuple[re.Pattern[str], str]]:
    """Return patterns of names with their meanings; patterns with the fewest placeholders come first."""
    rows = list(_rows(_text()))
    rows.sort(key=lambda row: len(_PLACEHOLDER.findall(row[0])))
    return [(_pattern(name), meaning) for name, meaning in rows]


def _text() -> str:
    pages = metrics_page(), metrics_page().with_name("metrics_speed.md")
    return "\n".join(page.read_text(encoding="utf-8") for page in pages)


def _rows(page: str) -> Iterator[tuple[str, str]]:
    prefix: str | None = None
    for line in page.splitlines():
        if heading := _HEADING.match(line):
            prefix = heading["prefix"]
        elif prefix and (row := _ROW.fullmatch(line)):
            for name in re.findall("`([^`]+)`", row["names"]):
                yield prefix + name, _plain(row["meaning"])
                if prefix == _VALIDATION:
                    yield f"{prefix}<source>/{name}", f"of one source: {_plain(row['meaning'])}"


def _pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a name. A placeholder matches anything without "/", and at the end also "/"."""
    parts = [re.escape(part) for part in _PLACEHOLDER.split(name)]
    return re.compile("[^/]+".join(parts) if parts[-1] else "[^/]+".join(parts[:-1]) + ".+")


def _plain(markdown: str) -> str:
    return _LINK.sub(r"\1", markdown).replace("`", "").replace(r"\|", "|")
