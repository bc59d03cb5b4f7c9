"""docs/how_to/notebook.md and docs/how_to/notebook.ipynb say what there is."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import nbformat
import pytest

from nemo_like import GRPO, RunResult
from nemo_like.api.base_configuration import InputFiles, ProgramArguments
from nemo_like.api.given_overrides import override_texts
from nemo_like.environments.own_reward import OF_A_TURN

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "how_to" / "notebook.md").read_text(encoding="utf-8")
NOTEBOOK = nbformat.read(DOCS / "how_to" / "notebook.ipynb", as_version=4)
CELLS = [cell.source for cell in NOTEBOOK.cells if cell.cell_type == "code"]
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
CODE = "\n".join([*BLOCKS, *CELLS]).replace("%matplotlib inline", "")
TEXTS = {node.value for node in ast.walk(ast.parse(CODE)) if isinstance(node, ast.Constant)}
SETTING = r"[a-z_]+(?:\.\w+)*=.+"
SETTINGS = sorted(
    text
    for text in {*TEXTS, *re.findall(r"`([^`\n]+)`", PAGE)}
    if isinstance(text, str)
    and re.fullmatch(SETTING, text)
    and not text.startswith(("logger.log_dir", "overrides"))
)


def rows_of(heading: str) -> list[str]:
    """What stands in the first column of the table below a heading of the page."""
    section = PAGE.split(heading, 1)[1]
    lines = section[section.index("|") :].split("\n\n", 1)[0].splitlines()[2:]
    return [line.split("|")[1].strip() for line in lines]


def test_the_notebook_is_kept_as_it_is_before_it_is_run() -> None:
    assert len(CELLS) >= 9
    assert [cell for cell in NOTEBOOK.cells if cell.get("outputs") or cell.get("execution_count")] == []


def test_the_table_of_arguments_has_all_of_them_in_their_order() -> None:
    named = re.findall(r"`(\w+)`", " ".join(rows_of("no file is needed.")))
    parameters = [*inspect.signature(GRPO).parameters]
    assert sorted(named) == sorted(parameters)


def test_the_table_of_parameters_has_all_that_a_turn_gives() -> None:
    assert {*re.findall(r"`(\w+)`", " ".join(rows_of("## Rewards")))} == {*OF_A_TURN}


def test_the_table_of_results_has_what_a_result_has() -> None:
    named = re.findall(r"result\.(\w+)", " ".join(rows_of("## The result")))
    result = RunResult("runs/addition")
    public = {name for name in dir(type(result)) if not name.startswith("_")} | {*vars(result)}
    assert {*named} == public


def test_the_overrides_of_the_page_are_keys() -> None:
    given = [
        ast.literal_eval(node.value)
        for node in ast.walk(ast.parse(CODE))
        if isinstance(node, ast.keyword) and node.arg == "overrides" and isinstance(node.value, ast.Dict)
    ]
    assert given
    files = InputFiles(Path("reward.pickle"), Path("train.jsonl"), None)
    for overrides in given:
        assert ProgramArguments(3, None, override_texts(overrides)).configuration("models/mine", files)


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_setting_of_the_page_or_of_the_notebook_is_one(setting: str) -> None:
    files = InputFiles(Path("reward.pickle"), Path("train.jsonl"), None)
    assert ProgramArguments(3, None, (setting,)).configuration("models/mine", files)
