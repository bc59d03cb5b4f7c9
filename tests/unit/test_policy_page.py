"""docs/reference/layout_runs.md shows every run of the matrix of whole runs, and what was measured of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.matrix_of_runs import GROUPS, TOLERANCE, Deviation
from tests.functional.matrix_table import BEGIN, END, magnitude, rows, write_row

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "layout_runs.md"


def test_the_page_has_the_row_of_every_run() -> None:
    shown = rows(PAGE.read_text(encoding="utf-8"))
    assert list(shown) == [(group.name, spread.name) for group in GROUPS for spread in group.spreads]
    for row in shown.values():
        for cell in row.strip("|").split("|")[3:]:
            assert float(cell) <= TOLERANCE


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0"), (3e-12, "1e-8"), (2e-7, "1e-6"), (1e-6, "1e-6"), (0.7, "1e0")]
)
def test_a_difference_is_shown_as_the_next_power_of_ten(value: float, shown: str) -> None:
    assert magnitude(value) == shown


def test_a_row_takes_its_place_and_leaves_the_others(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\n{END}\nafter\n")
    group, measured = GROUPS[0], Deviation(loss=2e-7, grad_norm=0.0, weights=3e-6)
    second, first = group.spreads[1], group.spreads[0]
    write_row(page, group, second, measured)
    write_row(page, group, first, measured)
    write_row(page, group, second, Deviation(loss=2e-6, grad_norm=0.0, weights=3e-6))
    text = page.read_text()
    assert list(rows(text)) == [(group.name, first.name), (group.name, second.name)]
    assert rows(text)[group.name, second.name].endswith("| 1e-5 | 0 | 1e-5 |")
    assert text.startswith("before\n") and text.endswith("\nafter\n")
