"""The kind of docs/how_to/own_environment.md is one, and its rule and its reward are as the page says."""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.environments.registry import build_environment
from nemo_like.rollout.task_rules import task_problems
from tests.unit.documented import ROOT
from tests.unit.environments.asking import turn

PAGE = (ROOT / "docs" / "how_to" / "own_environment.md").read_text(encoding="utf-8")
FURTHER = ["++policy.model_name=somewhere"]


@pytest.fixture
def configuration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run whose only environment is of the page's kind."""
    (code,) = re.findall(r"```python\n(# my_brief\.py.*?)```", PAGE, re.DOTALL)
    (file,) = [one for one in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "my_brief" in one]
    (tmp_path / "my_brief.py").write_text(code)
    path = tmp_path / "brief.yaml"
    path.write_text(file.replace("defaults:\n", "defaults:\n  - grpo_arithmetic_cpu\n"))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_brief", raising=False)
    return path


def test_its_rule_is_over_two_options_with_their_defaults(configuration: Path) -> None:
    assert [str(one) for one in task_problems(load_config(configuration, FURTHER))] == []
    cfg = load_config(configuration, [*FURTHER, "env.task.options.longest=30"])
    (problem,) = [str(one) for one in task_problems(cfg)]
    assert problem == (
        "env.task.options.longest=30 must be above limit=30; what a response loses grows between the two"
    )


def test_a_longer_response_loses_more(configuration: Path) -> None:
    cfg = load_config(configuration, [*FURTHER, "env.task.options.longest=50"])
    environment = build_environment(cfg.env["task"])
    answers = asyncio.run(environment.step([turn("x" * length, "x") for length in (30, 40, 50, 90)]))
    assert [one.rewards["long"] for one in answers] == [0.0, -0.25, -0.5, -0.5]
    assert {one.rewards["right"] for one in answers} == {1.0}
