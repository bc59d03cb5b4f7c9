"""docs/how_to/recipes.md has configurations that run, and the example of docs/how_to/own_loss.md is a
loss."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.configuration import Config
from nemo_like.preflight.targets import Target, TargetKind, inspected
from nemo_like.rules.rules import validate

PAGES = Path(__file__).parents[2] / "docs" / "how_to"
RECIPES_PAGE = (PAGES / "recipes.md").read_text(encoding="utf-8")
EXAMPLE_PAGE = (PAGES / "own_loss.md").read_text(encoding="utf-8")
TABLE = RECIPES_PAGE.split("## Which recipe is which keys", 1)[1].split("\n## ", 1)[0]
RECIPES = dict(re.findall(r"^\| ([^|]+?) \| `([^`]+)` \|", TABLE, re.MULTILINE))
# The demo takes the ratio to the engine's log-probs, and leaves out samples without a gradient.
SCORED = "loss_fn.use_generation_logprobs_as_prev=false"


def test_every_recipe_that_the_page_promises_is_there() -> None:
    names = {name.split(" (")[0] for name in RECIPES}
    assert names >= {"GRPO", "Dr.GRPO", "DAPO", "GSPO", "CISPO", "SAPO", "RLOO", "REINFORCE++", "OPD"}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_a_configuration_that_runs(
    name: str, demo: Callable[..., Config], checkpoint: Path
) -> None:
    arguments = RECIPES[name].replace("=MODEL", f"={checkpoint}")
    validate(demo(SCORED, *shlex.split(arguments)))


def test_the_example_is_a_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source,) = re.findall(r"```python\n(# my_loss\.py\n.*?)```", EXAMPLE_PAGE, re.DOTALL)
    assert len(source.split("@reads")[1].splitlines()) <= 15
    (tmp_path / "my_loss.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = inspected(Target("loss_fn.kind", "my_loss:gated", TargetKind.loss, {"tau": 2.0}, "loss_fn"))
    assert seen.problem is None
    assert seen.columns is not None
    assert [column.name for column in seen.columns.reads] == ["credit"]
