"""docs/reference/columns.md's example is one."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from nemo_like.batch.columns import declared_by
from nemo_like.configuration import load_config
from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Turn
from tests.functional import own_columns

PAGE = (Path(__file__).parents[2] / "docs" / "reference" / "columns.md").read_text(encoding="utf-8")


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
