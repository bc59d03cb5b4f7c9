"""docs/reference/columns.md has every column of the framework, and its example is one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from nemo_like.batch import columns
from nemo_like.batch.columns import Column, declared_by, teacher_topk_columns
from nemo_like.batch.routed_experts import routed_experts_column
from nemo_like.configuration import load_config
from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Turn
from nemo_like.models.model_info import planned_shape, read_model_info
from tests.functional import own_columns

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "nemo_like"
PAGE = (ROOT / "docs" / "reference" / "columns.md").read_text(encoding="utf-8")

ROWS = re.findall(
    r"^\| `(\w+)` \| ((?:per_token|per_sample|ragged|objects)[^|]*) \|(.*)$", PAGE, re.MULTILINE
)
MIXTURE = read_model_info(str(planned_shape("Qwen3-30B-A3B")), "megatron")
DECLARED = [
    *(value for value in vars(columns).values() if isinstance(value, Column)),
    *teacher_topk_columns(2),
    routed_experts_column(MIXTURE),
]


def test_every_column_of_the_framework_has_a_row() -> None:
    layouts = {name: layout for name, layout, _ in ROWS}
    assert len(layouts) == len(ROWS)
    assert layouts.keys() == {column.name for column in DECLARED}
    for column in DECLARED:
        assert layouts[column.name].startswith(f"{column.layout.value} {column.dtype}".strip())
        assert ("per prompt" in layouts[column.name]) == column.per_prompt
        assert ("[" in layouts[column.name]) == bool(column.inner_shape)


def test_columns_are_declared_where_the_test_above_looks_for_them() -> None:
    """Others are of a user's own: a record's, and a recording's."""
    named = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bColumn\(\s*[\"A-Z]", path.read_text(encoding="utf-8"))
    }
    assert named == {"batch/columns.py", "batch/routed_experts.py", "sweep/multirun.py"}


def test_whoever_writes_and_reads_a_column_is_there() -> None:
    files = {file for _, _, cells in ROWS for file in re.findall(r"`([\w/]+\.py)`", cells)}
    assert len(files) > 10
    assert [file for file in sorted(files) if not (PACKAGE / file).is_file()] == []


def test_the_configuration_is_one(tmp_path: Path) -> None:
    files = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (text,) = [file for file in files if "my_columns" in file]
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    cfg = load_config(path, [])
    assert {source.env for source in (*cfg.data.train, *cfg.data.validation)} == {"judge"}
    assert cfg.env["judge"].options == {"target": "my_columns:Judge", "arguments": {}}
    assert cfg.loss_fn.kind == "my_columns:weighted"


def test_the_example_is_the_one_that_is_run() -> None:
    (code,) = re.findall(r"```python\n(# my_columns\.py.*?)```", PAGE, re.DOTALL)
    written: dict[str, Any] = {}
    exec(code, written)
    turn = Turn(prompt="9+9=", response="18", answer="18", is_truncated=False, response_ids=[1, 2, 3])
    answers = []
    for judge, loss in ((written["Judge"], written["weighted"]), (own_columns.Judge, own_columns.weighted)):
        declaration = declared_by("env.math", judge)
        assert declaration.writes == (own_columns.DESERVED, own_columns.LEVEL, own_columns.NOTES)
        assert declared_by("loss_fn", loss).reads == (own_columns.DESERVED, own_columns.LEVEL)
        (feedback,) = asyncio.run(judge().step([turn]))
        answers.append(checked(feedback, declaration.writes, 3))
    page, run = answers
    assert page.failure is None
    assert (page.rewards, page.columns["level"]) == ({"right": 1.0}, 3.0)
    assert page.columns["deserved"].tolist() == run.columns["deserved"].tolist() == [1.0, 0.75, 0.5]
    assert page.columns["notes"] == run.columns["notes"]
