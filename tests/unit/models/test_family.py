"""What families say of models, and that every file of their folder is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import nemo_like.models.families
from nemo_like.models.adapter_layers import ADAPTABLE_LAYERS
from nemo_like.models.family import (
    FAMILIES,
    Family,
    TrainedValues,
    described_types,
    family_of,
    nearest_type,
    without,
)

FOLDER = Path(nemo_like.models.families.__file__).parent


def test_every_file_of_the_folder_is_a_family_of_model_types_of_its_own() -> None:
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")
    assert list(FAMILIES.names()) == names
    families = [FAMILIES.load(name) for name in names]
    assert all(isinstance(family, Family) for family in families)
    types = [model_type for family in families for model_type in family.model_types]
    assert sorted(types) == list(described_types())
    assert {name: family_of(FAMILIES.load(name).model_types[0]) for name in names} == {
        name: FAMILIES.load(name) for name in names
    }


@pytest.mark.parametrize("model_type", ["gpt2", None, ["llama"]])
def test_another_model_type_has_no_family(model_type: object) -> None:
    assert family_of(model_type) is None


@pytest.mark.parametrize(
    ("model_type", "nearest"),
    [("llama4_text", "llama"), ("qwen3_next", "qwen3_moe"), ("gemma2", "gemma3_text"), ("gpt2", None)],
)
def test_the_nearest_type_is_one_of_a_similar_name(model_type: str, nearest: str | None) -> None:
    assert nearest_type(model_type) == nearest


@pytest.mark.parametrize(
    ("content", "refused"),
    [
        ({}, None),
        ({"bias": None}, None),
        ({"bias": True}, ("has bias=true, which is not supported", "use a checkpoint without it")),
    ],
)
def test_a_key_with_a_value_that_does_not_train_is_named(
    content: dict[str, Any], refused: tuple[str, str] | None
) -> None:
    (limit,) = without("bias")
    assert limit.refusal("policy", content) == refused


def test_a_missing_key_may_train_and_a_family_may_say_more() -> None:
    limit = TrainedValues("step", (1,), missing=1, rule="has gaps", remedy="set {group}.backend=fsdp")
    assert limit.refusal("value", {}) is None
    assert limit.refusal("value", {"step": 2}) == ("has gaps", "set value.backend=fsdp")


def test_a_family_has_the_rules_of_most_families_but_for_its_own() -> None:
    family = family_of("qwen3")
    assert family is not None
    assert family.layer_rule("mlp.linear_fc2.weight").hf_names == ("mlp.down_proj.weight",)
    assert family.expert_rule("linear_fc2.weight").hf_names == ("down_proj.weight",)
    with pytest.raises(KeyError, match="gate_weight"):
        family.layer_rule("mlp.shared_experts.gate_weight")


def test_the_linear_layers_of_a_checkpoint_follow_from_the_rules() -> None:
    usual = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert usual == ADAPTABLE_LAYERS == FAMILIES.load("qwen3").linear_layers
    assert FAMILIES.load("phi3").linear_layers == ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
