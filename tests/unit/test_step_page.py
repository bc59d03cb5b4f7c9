"""docs/explanation/step.md names what there is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nemo_like.batch import columns, tags

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "step.md").read_text(encoding="utf-8")
CALLS = [
    (re.findall(r"[A-Za-z_]{3,}", call)[0], re.findall(r"[\w/]+\.py", files))
    for call, files in re.findall(r"^([│├└][^\n]*?)\s{2,}(\S*\.py[^\n]*)$", PAGE, re.MULTILINE)
]


def test_the_picture_is_read() -> None:
    assert len(CALLS) > 20


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\b[\w/]+/\w+\.py", PAGE))))
def test_every_file_is_there(path: str) -> None:
    assert (ROOT / "nemo_like" / path).is_file()


@pytest.mark.parametrize(("name", "files"), CALLS)
def test_every_call_is_in_one_of_its_files(name: str, files: list[str]) -> None:
    sources = "".join((ROOT / "nemo_like" / file).read_text(encoding="utf-8") for file in files)
    assert re.search(rf"\b{name}\b", sources)


def test_every_column_and_tag_is_on_it() -> None:
    declared = [*columns.ROLLOUT_COLUMNS, *columns.POLICY_COLUMNS, columns.ENTROPIES]
    declared += [value for value in vars(tags).values() if isinstance(value, tags.Tag)]
    names = {one.name for one in declared} - {"answer_id"}  # of validation
    assert not {name for name in names if f"`{name}`" not in PAGE}


@pytest.mark.parametrize(("heading", "most"), [("The way of a log-prob", 26), ("The way of a weight", 18)])
def test_the_ways_are_not_longer_than_they_were(heading: str, most: int) -> None:
    """Of alternatives in one row, such as two backends, one is on a way; they are joined by "or"."""
    (section,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| \d+ \| ([^|]*) \|", section, re.MULTILINE)
    on_the_way = [len(re.findall(r"`[\w/]+\.py`", row.split(" or ")[0].split(", `cuda")[0])) for row in rows]
    assert min(on_the_way) >= 1
    assert sum(on_the_way) <= most
