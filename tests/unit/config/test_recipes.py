"""Every recipe against the sizes of its real model, as ``--dry-run`` judges it."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import run_grpo
from nemo_like.config.loader import load_config, to_dict
from nemo_like.config.model_info import read_model_info
from nemo_like.config.plan import ray_gpus
from tests.unit.config.checkpoints import REPOSITORY

MODELS = REPOSITORY / "tests" / "models"
RECIPES = sorted((REPOSITORY / "recipes").glob("*.yaml"))
GPUS_PER_NODE = 8

pytestmark = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def num_nodes(recipe: Path) -> int:
    """As its name says: ...-4n8g."""
    match = re.search(rf"-(\d+)n{GPUS_PER_NODE}g$", recipe.stem)
    assert match, f"{recipe.name} does not end in nodes and GPUs per node, like -1n8g"
    return int(match[1])


def model_of(recipe: Path, directory: Path) -> Path:
    """A checkpoint of empty weights with the sizes of the recipe's model."""
    checkpoint = directory / Path(load_config(recipe).policy.model_name).name
    shutil.copytree(MODELS / checkpoint.name, checkpoint)
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (checkpoint / name).touch()
    return checkpoint


def test_a_dry_run_accepts_it(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = model_of(recipe, tmp_path)
    problems = tmp_path / "problems.jsonl"
    problems.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    code = run_grpo.main(
        [
            *("--config", str(recipe), "--dry-run", f"policy.model_name={checkpoint}"),
            *(f"data.train.path={problems}", f"data.validation.path={problems}"),
        ]
    )
    shown = capsys.readouterr()
    assert code == 0, shown.err
    model = read_model_info(str(checkpoint), load_config(recipe).policy.backend)
    assert f"{model.num_parameters:,} parameters" in shown.out


def test_it_uses_every_gpu_of_its_nodes(recipe: Path) -> None:
    cfg = load_config(recipe)
    assert ray_gpus(cfg) == cfg.cluster.num_gpus == num_nodes(recipe) * GPUS_PER_NODE


def test_a_model_replica_fits_into_a_node(recipe: Path) -> None:
    cfg = load_config(recipe)
    megatron = cfg.policy.megatron_cfg
    assert GPUS_PER_NODE % megatron.tensor_model_parallel_size == 0
    assert GPUS_PER_NODE % cfg.generation.vllm_cfg.tensor_parallel_size == 0


def test_it_joins_a_cluster_exactly_when_it_has_more_than_one_node(recipe: Path) -> None:
    assert (load_config(recipe).cluster.address is not None) == (num_nodes(recipe) > 1)


def test_it_sets_nothing_to_the_value_that_it_inherits(recipe: Path) -> None:
    own = yaml.safe_load(recipe.read_text())
    base = recipe.parent / own.pop("defaults")
    inherited = dict(_leaves(to_dict(load_config(base, ["++policy.model_name=none"]))))
    assert [key for key, value in _leaves(own) if inherited.get(key, ...) == value] == []


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
