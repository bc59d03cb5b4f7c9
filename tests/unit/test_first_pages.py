"""README.md, CONTRIBUTING.md and AGENTS.md are short, and name what is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.unit.documented import FIRST_PAGES, ROOT

# As `wc -w` counts them, code included.
MOST_WORDS = {"README.md": 900, "CONTRIBUTING.md": 500, "AGENTS.md": 500}
PACKAGE = ROOT / "nemo_like"
MADE = {".cache/models/", "runs/", "site/"}


@pytest.mark.parametrize("name", MOST_WORDS)
def test_a_first_page_is_short(name: str) -> None:
    words = len((ROOT / name).read_text(encoding="utf-8").split())
    assert words <= MOST_WORDS[name], f"{name} has {words} words: move what its reader needs later into docs/"


def test_all_of_them_are_limited() -> None:
    assert [page.name for page in FIRST_PAGES] == list(MOST_WORDS)


@pytest.mark.parametrize("page", FIRST_PAGES, ids=lambda page: page.stem)
def test_every_file_and_folder_that_it_names_is_there(page: Path) -> None:
    """Folders of the package may be named from within it."""
    named = set(re.findall(r"`([\w.*/-]+(?:/|\.py|\.yaml|\.toml))`", page.read_text(encoding="utf-8"))) - MADE
    assert len(named) >= 3
    assert [name for name in sorted(named) if not any(ROOT.glob(name)) and not any(PACKAGE.glob(name))] == []
