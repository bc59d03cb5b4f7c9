"""docs/how_to/gpu_check.md and docs/explanation/memory.md say of scripts/gpu_check.py and of the memory
timetable what they are."""

from __future__ import annotations

import re
from pathlib import Path

from nemo_like.configuration import load_config
from nemo_like.plan.memory_timetable import format_timetable, gpu_bytes, memory_timetable
from nemo_like.plan.run_models import run_models
from scripts.gpu_check_parts.commands import MODEL_CONFIG, PARTS
from scripts.gpu_check_parts.judgement import (
    MAX_MISMATCH,
    MEMORY_LEFT,
    MEMORY_SHARE,
    MEMORY_SLACK,
    MIN_ACCURACY,
)
from scripts.gpu_check_parts.random_model import write_config
from scripts.gpu_check_parts.settings import GIB, ROOT

PAGE = (ROOT / "docs" / "how_to" / "gpu_check.md").read_text(encoding="utf-8")
MEMORY = (ROOT / "docs" / "explanation" / "memory.md").read_text(encoding="utf-8")


def test_every_part_has_its_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", PAGE, re.MULTILINE)
    assert rows == [(part.name, str(part.budget_s)) for part in PARTS]


def test_the_limits_are_those_of_the_check() -> None:
    assert f"accuracy is below {MIN_ACCURACY} " in PAGE
    assert f"was above {MAX_MISMATCH} in" in PAGE
    assert f"by over {MEMORY_SHARE:.0%}".replace("%", " %") in PAGE
    assert (MEMORY_SLACK, MEMORY_LEFT) == (GIB // 2, GIB // 4)  # "half a GiB", "a quarter of a GiB"


def test_the_timetable_is_the_one_of_the_checks_model(tmp_path: Path) -> None:
    write_config(tmp_path, "1.7B")
    given = [f"policy.model_name={tmp_path}", "data.train.path=prompts.jsonl", "cluster.gpu_memory_gib=79"]
    cfg = load_config(MODEL_CONFIG, given)
    lines = format_timetable(memory_timetable(cfg, run_models(cfg), gpu_bytes(cfg)))
    first = next(index for index, line in enumerate(lines) if line.startswith("GiB on"))
    assert "\n".join(lines[first:]) in MEMORY
