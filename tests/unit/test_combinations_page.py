"""docs/combinations.md says what the rules say, and names tests that exist."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from nemo_like.config.machine_rules import Machine
from nemo_like.config.problems import ConfigError
from nemo_like.config.rules import validate
from nemo_like.config.schema import Config
from tests.unit.config.checkpoints import SCORED, write_checkpoint

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "combinations.md").read_text(encoding="utf-8")
BASES = dict(re.findall(r"^\| (\w+) \| `([^`]+)` \|$", PAGE, re.MULTILINE))
GPUS = (
    *("policy.device=cuda", "policy.precision=bfloat16", "policy.data_parallel_size=2"),
    *("cluster.gpus_per_node=8", "generation.num_engines=2"),
)


class Cell(NamedTuple):
    column: str
    row: str
    arguments: str
    verdict: str  # tested, accepted or refused
    named: str  # a test or a key


def cells() -> list[Cell]:
    found = []
    for table in re.findall(r"(?:^\|.*\n)+", PAGE, re.MULTILINE):
        header, _, *rows = ([part.strip() for part in line[1:-1].split(" |")] for line in table.splitlines())
        if header[0] != "with":
            continue
        for row, arguments, *texts in rows:
            for column, text in zip(header[2:], texts, strict=True):
                verdict, _, named = text.partition(": ")
                found.append(Cell(column, row, arguments.strip("`"), verdict, named.strip("`")))
    return found


CELLS = cells()


@pytest.fixture
def stand_ins(tmp_path: Path, checkpoint: Path) -> dict[str, str]:
    """Checkpoints, by the word that stands for each in the tables, and arguments that stand for GPUs."""
    experts = {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    made = {
        "LARGER": write_checkpoint(tmp_path / "larger", num_hidden_layers=4),
        "FEWER_TOKENS": write_checkpoint(tmp_path / "fewer", vocab_size=63),
        "MIXTURE": write_checkpoint(tmp_path / "mixture", model_type="qwen3_moe", **experts),
        "VISION": write_checkpoint(tmp_path / "vision"),
        "REWARD_MODEL": write_checkpoint(tmp_path / "reward_model"),
        "LABELS": write_checkpoint(tmp_path / "labels"),
    }
    for word, labels in (("REWARD_MODEL", 1), ("LABELS", 2)):
        header = json.dumps({"score.weight": {"shape": [labels, 128]}}).encode()
        (made[word] / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = made["VISION"] / "config.json"
    of_text = json.loads(config.read_text())
    seeing = {"model_type": "qwen3_vl", "text_config": {**of_text, "model_type": "qwen3_vl_text"}}
    tokens = {"image_token_id": 60, "video_token_id": 61}
    config.write_text(json.dumps({**seeing, "vision_config": {"hidden_size": 32}, **tokens}))
    return {word: str(path) for word, path in made.items()} | {"GPUS": " ".join(GPUS)}


def with_stand_ins(arguments: str, stand_ins: dict[str, str]) -> list[str]:
    for word, meant in stand_ins.items():
        arguments = re.sub(rf"\b{word}\b", meant, arguments)
    return shlex.split(arguments)


def test_the_page_is_read() -> None:
    assert {cell.column for cell in CELLS} == set(BASES)
    assert len(CELLS) == len({(cell.column, cell.row) for cell in CELLS}) > 40


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.column}, {cell.row}")
def test_the_rules_say_what_the_page_says(
    cell: Cell, demo: Callable[..., Config], stand_ins: dict[str, str]
) -> None:
    cfg = demo(SCORED, *shlex.split(BASES[cell.column]), *with_stand_ins(cell.arguments, stand_ins))
    if cell.verdict == "refused":
        with pytest.raises(ConfigError) as caught:
            validate(cfg, Machine.another)
        keys = [problem.key for problem in caught.value.problems]
        assert any(key == cell.named or key.startswith(f"{cell.named}=") for key in keys), str(caught.value)
        assert all(problem.remedy for problem in caught.value.problems)
    else:
        validate(cfg, Machine.another)


@pytest.mark.parametrize(
    "test", sorted({cell.named for cell in CELLS if cell.verdict == "tested"}), ids=lambda test: test
)
def test_every_test_that_the_page_names_is_there(test: str) -> None:
    file, _, name = test.partition("::")
    name, _, case = name.partition("[")
    source = (TESTS / file).read_text(encoding="utf-8")
    assert f"\ndef {name}(" in source
    assert f'"{case.removesuffix("]")}"' in source or not case


def test_every_verdict_is_one_of_three() -> None:
    for cell in CELLS:
        assert cell.verdict in ("tested", "accepted", "refused"), cell
        assert bool(cell.named) == (cell.verdict != "accepted"), cell
