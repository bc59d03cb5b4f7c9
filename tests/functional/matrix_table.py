"""The table of docs/reference/layout_runs.md that says how far the runs of the matrix were from their plain
runs.

It shows orders of magnitude, and is written when it is asked for only, so that rounding does not rewrite it.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

from tests.functional.matrix_of_runs import GROUPS, Deviation, Group, Spread

BEGIN, END = "<!-- matrix of whole runs: begin -->", "<!-- matrix of whole runs: end -->"
_HEAD = "| group | run | sampled by | loss | grad norm | weights |\n|---|---|---|---|---|---|\n"


def magnitude(value: float) -> str:
    """The next power of ten, as "1e-6"; differences below float32's resolution are all 1e-8."""
    return "0" if value == 0 else f"1e{max(-8, math.ceil(math.log10(value)))}"


def rows(page: str) -> dict[tuple[str, str], str]:
    """The table's lines by group and run."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    return {(line[0], line[1]): text for text, line in _lines(table)}


def _lines(table: str) -> list[tuple[str, list[str]]]:
    found = [line for line in table.splitlines() if re.match(r"\| (?!group)\w", line)]
    return [(line, [cell.strip() for cell in line.strip("|").split("|")]) for line in found]


def write_row(path: Path, group: Group, spread: Spread, found: Deviation) -> None:
    """Put what was measured of one run into the page; the rows are in the matrix's order."""
    page = path.read_text(encoding="utf-8")
    cells = [magnitude(value) for value in (found.loss, found.grad_norm, found.weights)]
    by = "its own engines" if spread.samples else "the plain run"
    known = rows(page) | {
        (group.name, spread.name): f"| {group.name} | {spread.name} | {by} | {' | '.join(cells)} |"
    }
    keys = [(each.name, one.name) for each in GROUPS for one in each.spreads]
    table = "".join(f"{known[key]}\n" for key in keys if key in known)
    before, after = page.partition(BEGIN)[0], page.partition(END)[2]
    path.write_text(f"{before}{BEGIN}\n{_HEAD}{table}{END}{after}", encoding="utf-8")
