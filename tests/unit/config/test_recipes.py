"""Every recipe against the sizes of its real model, as ``--dry-run`` judges it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import run_grpo
from nemo_like.config.loader import to_dict
from nemo_like.config.search_path import find_configuration
from nemo_like.configuration import load_config
from nemo_like.data.interface import Message, TaskPrompt
from nemo_like.data.mixture import templated
from nemo_like.data.sources import data_sources
from nemo_like.models.model_info import read_model_info
from nemo_like.plan.places import gpus_by_node, placement
from tests.unit.config.checkpoints import REPOSITORY
from tests.unit.config.recipes import GPUS_PER_NODE, RECIPES, num_nodes

SHAPES = REPOSITORY / "recipes" / "shapes"

pytestmark = pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)


def test_a_dry_run_needs_neither_the_model_nor_the_data_and_says_so(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)  # there is nothing here, as in a fresh clone
    code = run_grpo.main(["--config", str(recipe), "--dry-run"])
    shown = capsys.readouterr()
    assert code == 0, shown.err
    cfg = load_config(recipe)
    shape = SHAPES / Path(cfg.policy.model_name).name
    model = read_model_info(str(shape), cfg.policy.backend)
    assert f"{model.num_parameters:,} parameters" in shown.out
    for line in (
        f"assumed      policy.model_name: {cfg.policy.model_name} is not here",
        f"not checked  policy.model_name: weights and tokenizer of {cfg.policy.model_name}",
        "not checked  data.train: data/train.jsonl is not here",
    ):
        assert line in shown.out


def test_it_puts_problems_as_chats_with_a_system_prompt_and_asks_for_a_boxed_answer(recipe: Path) -> None:
    for _, source in data_sources(load_config(recipe).data):
        system, user = templated(TaskPrompt("What is {2}+2?", "4"), source).prompt
        assert isinstance(system, Message) and isinstance(user, Message)
        assert (system.role, user.role) == ("system", "user")
        assert system.content == "You are an assistant who solves problems of mathematics."
        instruction = "Reason step by step, and put the final answer in \\boxed{}."
        assert user.content.startswith(f"What is {{2}}+2?\n\n{instruction}")
        # Qwen3's own switch between thinking at length and answering.
        assert user.content.endswith("/no_think") == ("qwen3" in recipe.stem)


def test_it_computes_no_padding_and_no_sample_without_a_gradient(recipe: Path) -> None:
    cfg = load_config(recipe)
    packing, longest = cfg.policy.sequence_packing, cfg.policy.max_total_sequence_length
    assert packing.enabled
    assert packing.train_mb_tokens >= 2 * longest
    assert packing.logprob_mb_tokens == 4 * packing.train_mb_tokens
    assert cfg.grpo.skip_idle_samples
    assert not cfg.generation.vllm_cfg.enforce_eager


def test_it_uses_every_gpu_of_its_nodes(recipe: Path) -> None:
    cfg = load_config(recipe)
    assert cfg.cluster.gpus_per_node == GPUS_PER_NODE
    assert cfg.cluster.num_nodes == num_nodes(recipe)
    assert gpus_by_node(placement(cfg)) == dict.fromkeys(range(num_nodes(recipe)), GPUS_PER_NODE)


def test_a_model_replica_fits_into_a_node(recipe: Path) -> None:
    cfg = load_config(recipe)
    megatron = cfg.policy.megatron_cfg
    assert GPUS_PER_NODE % megatron.tensor_model_parallel_size == 0
    assert GPUS_PER_NODE % cfg.generation.vllm_cfg.tensor_parallel_size == 0


def test_it_joins_a_cluster_exactly_when_it_has_more_than_one_node(recipe: Path) -> None:
    assert (load_config(recipe).cluster.address is not None) == (num_nodes(recipe) > 1)


def test_it_sets_nothing_to_the_value_that_it_inherits(recipe: Path) -> None:
    own = yaml.safe_load(recipe.read_text())
    (base,) = own.pop("defaults")
    inherited = dict(_leaves(to_dict(load_config(find_configuration(base), ["++policy.model_name=none"]))))
    assert [key for key, value in _leaves(own) if inherited.get(key, ...) == value] == []


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", str(value)
