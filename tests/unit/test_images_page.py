"""docs/how_to/images.md's environment is one that answers with a picture."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

from nemo_like.configuration import load_config
from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import Turn

PAGE = (Path(__file__).parents[2] / "docs" / "how_to" / "images.md").read_text(encoding="utf-8")


def test_the_configuration_of_the_environment_is_one(tmp_path: Path) -> None:
    (text,) = [block for block in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if "zoom" in block]
    (tmp_path / "mine.yaml").write_text(text)
    cfg = load_config(tmp_path / "mine.yaml", [])
    assert {source.env for source in (*cfg.data.train, *cfg.data.validation)} == {"zoom"}
    assert (cfg.env["zoom"].kind, cfg.env["zoom"].max_turns) == ("custom", 3)


def test_the_environment_answers_with_a_picture() -> None:
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    written: dict[str, Any] = {}
    exec(code, written)
    asked = [
        Turn(prompt="<image>red=", response=response, answer="3", is_truncated=False, is_last=is_last)
        for response, is_last in (("zoom", False), ("zoom 3", True), ("2", False))
    ]
    zoomed, last, wrong = map(checked, asyncio.run(written["Zoom"]().step(asked)))
    assert (zoomed.observation, zoomed.is_done) == ("closer: <image>", False)
    assert zoomed.images[0].size() == (56, 56)
    assert (last.rewards, wrong.rewards) == ({"right": 1.0}, {"right": 0.0})
