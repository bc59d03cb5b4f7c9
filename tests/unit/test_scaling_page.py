"""docs/explanation/scaling.md has the tables that scripts/plan_scale.py prints today, and names what is
there."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from nemo_like_tools.scale_plan.hardware import GPUS, Assumptions
from scripts import plan_scale

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "explanation" / "scaling.md").read_text(encoding="utf-8")
GPU = GPUS["h100-sxm"]


@pytest.fixture(scope="module")
def tables() -> dict[str, str]:
    planned = plan_scale.plan(plan_scale.DEFAULT_CONFIGS, plan_scale.DEFAULT_GPUS, GPU, Assumptions())
    return plan_scale.step_tables(planned) | plan_scale.comparisons(GPU, Assumptions())


def test_the_tables_are_what_the_script_prints(tables: dict[str, str]) -> None:
    changed = [title for title, table in tables.items() if table not in PAGE]
    assert not changed, "run python scripts/plan_scale.py and put its tables into docs/explanation/scaling.md"


def test_every_assumption_is_explained_or_has_a_row(tables: dict[str, str]) -> None:
    prose = PAGE.replace(tables["Assumptions"], "")
    unexplained = {field.name for field in fields(Assumptions) if f"`{field.name}`" not in prose}
    assert not unexplained


def test_every_path_is_there() -> None:
    for path in set(re.findall(r"(?<![\w/])`((?:scripts|nemo_like|recipes|docs)/[\w/.-]+)`", PAGE)):
        assert (ROOT / path).exists(), path
    for page in set(re.findall(r"\]\(([\w./]+\.md)", PAGE)):
        assert (ROOT / "docs" / "explanation" / page).exists(), page
