"""docs/reference/dependencies.md and dependencies_core.md have every reach-in of the code, and name
what there is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.observability.software import package_ranges
from tests.unit.reach_ins import ReachIn, reach_ins

ROOT = Path(__file__).parents[2]
PACKAGE, SCRIPTS = ROOT / "nemo_like", ROOT / "scripts"
PAGES = [ROOT / "docs" / "reference" / f"dependencies{part}.md" for part in ("", "_core")]
PAGE = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
HEADINGS = dict(re.findall(r"^## (\S+) (\S+)$", PAGE, re.MULTILINE))


@dataclass(frozen=True, slots=True)
class Row:
    file: str
    names: tuple[str, ...]
    tests: tuple[str, ...]

    @classmethod
    def of(cls, line: str) -> Row:
        where, what, _, tests, _ = (re.findall(r"`([^`]+)`", cell) for cell in line.strip("| ").split(" | "))
        (file,) = where
        return cls(file, tuple(what), tuple(tests))


ROWS = [Row.of(line) for line in PAGE.splitlines() if line.startswith("| `")]


SAMPLE = """
import os
import torch
import numpy as np
from ray._private import services
from vllm.model_executor.models import registry
from other import Base
from own import ours

class Child(Base):
    def __init__(self):
        self._mine = torch._C.thing
        object.__setattr__(self, "_hidden", ours._record)
    def _replaced(self): return self._mine, self._hidden, self._theirs
    def _helper(self): return self._helper()
np.linalg.norm = services.start = registry.look_up()
setattr(torch, "name", getattr(torch, "_named"))
ours.field = torch.field = torch.zeros(1, _option=1).__ray_call__
os._exit(0)
"""


def test_the_scan_finds_every_kind_of_reach_in(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "sample.py").write_text(SAMPLE)
    assert {one.name for one in reach_ins(tmp_path / "own")} == {
        *("_C", "_theirs", "_record", "_named", "_option", "__ray_call__"),  # private names
        *("norm", "field", "torch"),  # assignments to what is another's
        *("services", "start", "registry", "look_up"),  # undocumented modules, and what is used of them
        "_replaced",  # called by nobody but the class that has it
    }


def test_the_tables_are_read() -> None:
    assert len(ROWS) > 40
    assert all(row.names and row.tests for row in ROWS)


def test_every_reach_in_is_on_the_page() -> None:
    listed = {
        ReachIn(row.file, part) for row in ROWS for name in row.names for part in re.findall(r"\w+", name)
    }
    found = reach_ins(PACKAGE) | {
        ReachIn(f"scripts/{one.file}", one.name) for one in reach_ins(SCRIPTS, PACKAGE)
    }
    assert sorted(found - listed) == []


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.file}: {row.names[0]}")
def test_every_file_has_what_the_page_says(row: Row) -> None:
    folder = ROOT if row.file.startswith(("scripts/", "nemo_like_tools/")) else PACKAGE
    source = (folder / row.file).read_text(encoding="utf-8")
    last_words = [re.findall(r"\w+", name)[-1] for name in row.names]
    assert [word for word in last_words if not re.search(rf"(\b|_){word}(\b|_)", source)] == []


@pytest.mark.parametrize("test", sorted({test for row in ROWS for test in row.tests}))
def test_every_test_is_there(test: str) -> None:
    path, _, name = test.partition("::")
    assert re.search(rf"\b{name}\b", (ROOT / "tests" / path).read_text(encoding="utf-8"))


def test_the_versions_are_those_of_the_ranges() -> None:
    ranges = {requirement.name: requirement.specifier for requirement in package_ranges()}
    for package, version in HEADINGS.items():
        if package != "Python":
            assert f">={version}" in str(ranges[package]).split(",")


def test_a_range_has_an_end_only_where_the_page_says_why() -> None:
    ended = {requirement.name for requirement in package_ranges() if "<" in str(requirement.specifier)}
    assert ended <= HEADINGS.keys()
