"""The tables of docs/reference/combinations.md and of the pages that go on with it, cell by cell."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
_PARTS = ("", "_overlap", "_agents", "_kinds")
_PAGES = [ROOT / "docs" / "reference" / f"combinations{part}.md" for part in _PARTS]
_PAGE = "\n".join(page.read_text(encoding="utf-8") for page in _PAGES)


class Base(NamedTuple):
    """What every cell of a column begins with."""

    configuration: str  # a file, from the root of the repository
    arguments: str  # before those of the cell


BASES = {
    column: Base(f"configs/{name}", arguments)
    for column, name, arguments in re.findall(
        r"^\| (\w+) \| `(\w+\.yaml)` \| (?:`([^`]+)` )?\|$", _PAGE, re.M
    )
}


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


def of_pictures(directory: Path) -> list[str]:
    """Return arguments with which the demo's problems are those of ``directory``, which have pictures."""
    data = {"kind": "jsonl", "env": "count", "images_key": "images"}
    files = [f"data.{name}.path={directory / name}.jsonl" for name in ("train", "validation")]
    of_data = [f"data.default.{key}={value}" for key, value in data.items()]
    return ["policy.backend=fsdp", "env@env.count=exact_match", *of_data, *files]
