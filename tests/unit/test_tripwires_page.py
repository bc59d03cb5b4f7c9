"""docs/explanation/tripwires.md has every tripwire, and no other; mutations.md has every group of bugs."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.rollout_checks import _COUNTS
from tests.tripwires.mutations import MUTATIONS, Group

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "tripwires.md").read_text(encoding="utf-8")
MUTATIONS_PAGE = (ROOT / "docs" / "explanation" / "mutations.md").read_text(encoding="utf-8")
ROOM = ROOT / "nemo_like" / "tripwires"


def names_in_code() -> set[str]:
    """What ``Alarm(tripwire=...)`` is given, and what a worker itself raises when a checkpoint is wrong."""
    found = {name for name, _, _ in _COUNTS.values()} | {"stored_weights"}
    for path in ROOM.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.keyword)
                and node.arg == "tripwire"
                and isinstance(node.value, ast.Constant)
            ):
                found.add(str(node.value.value))
    return found


def test_the_table_has_every_tripwire() -> None:
    table = PAGE.split("## What is checked")[1].split("## ")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == names_in_code()


def test_every_measured_number_is_measured_and_judged() -> None:
    sources = {
        path: path.read_text(encoding="utf-8")
        for path in (ROOT / "nemo_like").rglob("*.py")
        if path.name != "measured.py"
    }
    judged = "".join(text for path, text in sources.items() if path.parent in (ROOM, ROOM.parent / "driver"))
    measured = "".join(
        text for path, text in sources.items() if path.parent not in (ROOM, ROOM.parent / "driver")
    )
    for name in Measured:
        assert f"Measured.{name.name}" in judged, name
        assert f"Measured.{name.name}" in measured, name


def test_every_path_is_there() -> None:
    for path in set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", PAGE)):
        assert (ROOT / path).exists() or (ROOT / "nemo_like" / path).exists(), path


def test_the_numbers_of_mutations_are_right() -> None:
    assert f"has {len(MUTATIONS)} bugs" in MUTATIONS_PAGE
    counts = {group.value: 0 for group in Group}
    for one in MUTATIONS.values():
        counts[one.group.value] += 1
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \|", MUTATIONS_PAGE, re.MULTILINE)
    assert {name: int(count) for name, count in rows} == counts


def test_the_table_of_sentences_has_every_bug_of_the_weight_sync() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `", MUTATIONS_PAGE, re.MULTILINE)
    of_weight_sync = {name for name, one in MUTATIONS.items() if one.group is Group.weight_sync}
    assert of_weight_sync <= set(rows) <= MUTATIONS.keys()
    assert f"of these {len(rows)};" in MUTATIONS_PAGE
