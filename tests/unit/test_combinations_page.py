"""docs/reference/combinations.md and the pages that go on with it say what the rules say, and name tests
that exist."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from nemo_like.config.arguments import read_arguments
from nemo_like.config.composition import composing
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.plan.machine_rules import Machine
from nemo_like.rules.rules import validate
from tests.combinations_page import BASES, CELLS, ROOT, Cell, of_pictures, with_stand_ins
from tests.unit.config.checkpoints import DEMO, SCORED, write_checkpoint

TESTS = ROOT / "tests"
NEEDS_GPUS = "needs GPUs"
GPUS = (
    *("policy.device=cuda", "policy.precision=bfloat16", "policy.data_parallel_size=2"),
    *("cluster.gpus_per_node=8", "generation.num_engines=2"),
)


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Checkpoints, by the word that stands for each in the tables, and arguments that stand for GPUs."""
    path = tmp_path_factory.mktemp("stand_ins")
    experts = {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
    }
    made = {
        "TEACHER": write_checkpoint(path / "teacher", num_hidden_layers=4),
        "LARGER": write_checkpoint(path / "larger", num_hidden_layers=4),
        "FEWER_TOKENS": write_checkpoint(path / "fewer", vocab_size=63),
        "MORE_TOKENS": write_checkpoint(path / "more", vocab_size=128),
        "OTHER_TOKENIZER": write_checkpoint(path / "other"),
        "MIXTURE": write_checkpoint(path / "mixture", model_type="qwen3_moe", **experts),
        "VISION": write_checkpoint(path / "vision"),
        "CODE": write_checkpoint(path / "code", model_type="own", auto_map={"AutoConfig": "own.Config"}),
        "REWARD_MODEL": write_checkpoint(path / "reward_model"),
        "LABELS": write_checkpoint(path / "labels"),
    }
    (made["OTHER_TOKENIZER"] / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0}}}')
    for word, labels in (("REWARD_MODEL", 1), ("LABELS", 2)):
        header = json.dumps({"score.weight": {"shape": [labels, 128]}}).encode()
        (made[word] / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    config = made["VISION"] / "config.json"
    of_text = json.loads(config.read_text())
    seeing = {"model_type": "qwen3_vl", "text_config": {**of_text, "model_type": "qwen3_vl_text"}}
    tokens = {"image_token_id": 60, "video_token_id": 61}
    config.write_text(json.dumps({**seeing, "vision_config": {"hidden_size": 32}, **tokens}))
    write_recording(path / "recording")
    made["CALLING_MIXTURE"] = made["MIXTURE"]
    words = {word: str(path) for word, path in made.items()}
    pictures = [f"policy.model_name={words['VISION']}", *of_pictures(path)]
    return {
        **words,
        "GPUS": " ".join(GPUS),
        "IMAGES": " ".join(pictures),
        "RECORDING": str(path / "recording"),
    }


def write_recording(directory: Path) -> None:
    """Of the demo's rollouts, as far as rules look into them."""
    cfg = load_config(DEMO)
    directory.mkdir()
    sizes = {name: getattr(cfg.grpo, name) for name in ("num_prompts_per_step", "num_generations_per_prompt")}
    (directory / "manifest.json").write_text(json.dumps(sizes))
    for step in range(1, cfg.grpo.max_num_steps + 1):
        (directory / f"step_{step}-0.npz").touch()


@pytest.fixture(scope="module")
def composed(stand_ins: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The configuration of each column in one file, in which a value that follows another still does so."""
    directory = tmp_path_factory.mktemp("columns")
    there = [f"policy.model_name={write_checkpoint(directory / 'checkpoint')}", f"logger.log_dir={directory}"]

    def file(column: str) -> Path:
        path = directory / f"{column}.yaml"
        if not path.is_file():
            with composing(ROOT / BASES[column].configuration) as files:
                base = [*there, SCORED, *with_stand_ins(BASES[column].arguments, stand_ins)]
                arguments = read_arguments(files, base, Config)
                tree = files.compose(arguments.files, arguments.values)
            path.write_text(OmegaConf.to_yaml(OmegaConf.create(tree)))
        return path

    return file


def test_the_page_is_read() -> None:
    assert {cell.column for cell in CELLS} == set(BASES)
    assert len(CELLS) == len({(cell.column, cell.row) for cell in CELLS}) > 300


# What the page says to run without naming a test is run by a slow test.
@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=pytest.mark.slow if cell.verdict == "runs" else ()) for cell in CELLS],
    ids=lambda cell: f"{cell.column}, {cell.row}",
)
def test_the_rules_say_what_the_page_says(
    cell: Cell, composed: Callable[[str], Path], stand_ins: dict[str, str]
) -> None:
    cfg = load_config(composed(cell.column), with_stand_ins(cell.arguments, stand_ins))
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
    is_taken_over = f'"{name}",\n' in source  # from another module, for this one's cases
    assert is_taken_over or f"\ndef {name}(" in source
    assert f'"{case.removesuffix("]")}"' in source or not case


def test_what_cannot_run_on_a_cpu_alone_has_no_test() -> None:
    for cell in CELLS:
        assert cell.verdict in ("tested", "runs", "accepted", "refused"), cell
        assert bool(cell.named) == (cell.verdict != "runs"), cell
        is_for_gpus = cell.verdict != "refused" and "GPUS" in cell.arguments
        assert (cell.verdict, cell.named) == ("accepted", NEEDS_GPUS) or not is_for_gpus, cell
        assert is_for_gpus or cell.verdict != "accepted", cell
