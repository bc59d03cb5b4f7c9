"""A tutorial is one lesson: it says what its reader will have, needs and waits for, and is soon read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.documented import ROOT

PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FEWEST_WORDS, MOST_WORDS = 500, 1100  # as `wc -w` counts them, code included


def test_there_are_four() -> None:
    assert {page.stem for page in PAGES} == {"first_run", "your_data", "gpu_node", "agent"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_begins_with_its_end_its_needs_and_its_time(page: Path) -> None:
    _, end, needs, *_ = page.read_text(encoding="utf-8").split("\n\n")
    assert end.startswith("At the end of this lesson ")
    assert needs.startswith("You need ") and " minutes" in needs


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_is_short(page: Path) -> None:
    assert FEWEST_WORDS <= len(page.read_text(encoding="utf-8").split()) <= MOST_WORDS
