"""The tables of docs/combinations.md, cell by cell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_PAGE = (Path(__file__).parents[1] / "docs" / "combinations.md").read_text(encoding="utf-8")
# The arguments of each column, before those of its cells.
BASES = dict(re.findall(r"^\| (\w+) \| `([^`]+)` \|$", _PAGE, re.MULTILINE))


class Cell(NamedTuple):
    """What becomes of a column with a row's arguments."""

    column: str
    row: str
    arguments: str
    verdict: str  # tested, runs, accepted or refused
    named: str  # a test, why there is none, or a key


def _cells() -> list[Cell]:
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", _PAGE, re.MULTILINE):
        header, _, *rows = ([part.strip() for part in line[1:-1].split(" |")] for line in table.splitlines())
        if header[0] != "with":
            continue
        for row, arguments, *texts in rows:
            for column, text in zip(header[2:], texts, strict=True):
                verdict, _, named = text.partition(": ")
                found.append(Cell(column, row, arguments.strip("`"), verdict, named.strip("`")))
    return found


CELLS = _cells()


def with_stand_ins(arguments: str, stand_ins: Mapping[str, str]) -> list[str]:
    """Return the arguments one by one, with each word that stands for something replaced by what it means."""
    for word, meant in stand_ins.items():
        arguments = re.sub(rf"\b{word}\b", meant, arguments)
    return shlex.split(arguments)
