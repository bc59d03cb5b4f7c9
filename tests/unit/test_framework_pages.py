"""docs/reference/from_*.md have the tables that the messages and the script have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.config.other_frameworks import NoEffect, table_of
from nemo_like_tools.conversion.pages import table

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {name: table_of(name) for name in ("nemo_rl", "verl", "trl")}


@pytest.mark.parametrize("name", TABLES)
def test_a_page_has_the_table_as_the_script_prints_it(name: str) -> None:
    page = (DOCS / "reference" / f"from_{name}.md").read_text(encoding="utf-8")
    assert page.endswith(f"\n\n{table(TABLES[name])}\n"), f"paste scripts/convert_config.py --table {name}"


@pytest.mark.parametrize("name", TABLES)
def test_a_table_has_every_key_once(name: str) -> None:
    framework, lines = TABLES[name], table(TABLES[name]).splitlines()
    for key in framework.keys:
        assert sum(line.startswith(f"| `{key}` |") for line in lines) == 1


def test_a_reason_of_four_keys_or_more_stands_above_the_tables_once() -> None:
    entries = {f"a.{number}": NoEffect(why="of four") for number in range(4)}
    entries["b.0"] = NoEffect(why="of one")
    lines = table(replace(TABLES["verl"], keys=entries, rest={})).splitlines()
    assert lines[0] == "(1) of four."
    assert [line for line in lines if line.startswith("| `")] == [
        *(f"| `a.{number}` | no effect | (1) |" for number in range(4)),
        "| `b.0` | no effect | of one |",
    ]
