from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftConfig
from safetensors.torch import load_file

from nemo_like.models.adapter_layers import adapted_experts, adapted_layers, adapter_scale, named_layers
from nemo_like.policy.backends.adapters import (
    LORA_A,
    LORA_B,
    adapter_config,
    expert_layer,
    initial_value,
    peft_config,
    peft_name,
    write_adapters,
)
from nemo_like.policy.groups.adapter_rules import adapter_problems
from nemo_like.policy.options import LoraConfig

LORA = LoraConfig(
    enabled=True,
    rank=2,
    alpha=6.0,
    dropout=0.1,
    target_modules=["q_proj", "v_proj"],
    exclude_modules=[],
    use_rslora=False,
    adapter_path=None,
)
LAYER = "model.layers.0.self_attn.q_proj"


def test_a_layers_name_alone_decides_its_adapters_first_values() -> None:
    name = peft_name(LAYER, LORA_A)
    first, again = (initial_value(name, (2, 100)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, initial_value(name.replace("0", "1"), (2, 100)))
    # Uniform within 1 / sqrt(inputs), as peft draws them.
    assert 0.09 < first.abs().max() < 0.1 and abs(first.mean()) < 0.02
    assert not initial_value(peft_name(LAYER, LORA_B), (100, 2)).any()


def test_peft_reads_the_configuration_that_is_written(tmp_path: Path) -> None:
    config = adapter_config(peft_config(LORA, LORA.target_modules), tmp_path / "base")
    assert config == json.loads(json.dumps(config))
    name = peft_name(LAYER, LORA_A)
    assert name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_adapters(tmp_path / "adapter", config, {name: torch.ones(2, 3)})
    modes = {path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1  # weights can be read by whoever reads their configuration
    read = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (read.r, read.lora_alpha, read.lora_dropout) == (2, 6.0, 0.1)
    assert set(read.target_modules) == {"q_proj", "v_proj"}
    assert read.base_model_name_or_path == str(tmp_path / "base")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")[name].shape == (2, 3)


def test_the_scale_is_alpha_over_the_rank_or_over_its_root() -> None:
    four = replace(LORA, rank=4, alpha=8.0)
    assert adapter_scale(four) == 2.0
    assert adapter_scale(replace(four, use_rslora=True)) == 4.0
    config = adapter_config(peft_config(replace(four, use_rslora=True), ["q_proj"]), Path("base"))
    assert config["use_rslora"] and config["r"] == 4  # an engine or peft computes the same


def test_excluded_layers_get_no_adapter() -> None:
    without = replace(
        LORA, target_modules=["all-linear"], exclude_modules=["gate_proj", "up_proj", "down_proj"]
    )
    assert adapted_layers(without) == ("q_proj", "k_proj", "v_proj", "o_proj")
    assert named_layers(replace(LORA, exclude_modules=["v_proj"])) == ("q_proj",)
    assert adapted_layers(replace(without, exclude_modules=[]), num_experts=4) == adapted_layers(without)
    assert adapted_experts(replace(LORA, target_modules=["up_proj", "gate_proj"])) == ("gate_up_proj",)
    assert adapted_experts(replace(without, exclude_modules=[])) == ()
    (problem,) = adapter_problems("policy", replace(LORA, exclude_modules=["v_proj", "q_proj"]))
    assert str(problem).startswith("policy.lora.target_modules=[q_proj, v_proj] leaves no layer")


def saved(directory: Path, **changes: Any) -> str:
    config = adapter_config(peft_config(LORA, LORA.target_modules), Path("base"))
    write_adapters(directory, config | changes, {peft_name(LAYER, LORA_B): torch.full((3, 2), 0.5)})
    return str(directory)


def test_adapters_begin_from_those_of_a_directory(tmp_path: Path) -> None:
    begun = saved(tmp_path)
    assert not [*adapter_problems("policy", replace(LORA, adapter_path=begun))]
    assert torch.equal(initial_value(peft_name(LAYER, LORA_B), (3, 2), begun), torch.full((3, 2), 0.5))
    with pytest.raises(ValueError, match=r"has nothing for .*lora_A\.weight, and the model needs"):
        initial_value(peft_name(LAYER, LORA_A), (2, 3), begun)
    with pytest.raises(ValueError, match=r"has a tensor of shape \(3, 2\) for .*, and the model needs"):
        initial_value(peft_name(LAYER, LORA_B), (4, 2), begun)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"r": 8}, "has r=8, and policy.lora.rank=2; set policy.lora.rank=8"),
        ({"lora_alpha": 16}, "has lora_alpha=16, and policy.lora.alpha=6.0; set policy.lora.alpha=16"),
        ({"use_rslora": True}, "has use_rslora=True, and policy.lora.use_rslora=False; set "),
        ({"target_modules": ["o_proj"]}, "has adapters beside o_proj, and policy.lora names others; set "),
        ({"use_dora": True}, "has use_dora, which adapters here do not have; merge it first"),
    ],
)
def test_adapters_of_another_shape_are_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    (problem,) = adapter_problems("policy", replace(LORA, adapter_path=saved(tmp_path, **changes)))
    assert told in str(problem)


def test_adapters_of_experts_begin_from_those_beside_their_stacked_parameters(tmp_path: Path) -> None:
    named = replace(LORA, target_modules=["q_proj", "w1", "w3", "w2"])
    config = adapter_config(peft_config(named, ["q_proj"], adapted_experts(named)), Path("base"))
    assert config["target_parameters"] == ["experts.gate_up_proj", "experts.down_proj"]
    write_adapters(tmp_path, config, {})
    told = [
        [
            str(one)
            for one in adapter_problems("policy", replace(LORA, target_modules=names, adapter_path=path))
        ]
        for path in [str(tmp_path)]
        for names in (
            ["q_proj", "w1", "w3", "w2"],
            ["q_proj", "gate_proj", "up_proj", "down_proj"],
            ["q_proj", "down_proj"],
            ["all-linear"],
        )
    ]
    remedy = "set policy.lora.target_modules=[down_proj,gate_proj,q_proj,up_proj]"
    assert [remedy in " ".join(one) for one in told] == [False, False, True, True]
    assert [len(one) for one in told] == [0, 0, 1, 1]


def test_peft_wraps_the_first_of_two_parameters_of_experts_twice() -> None:
    both = ("gate_up_proj", "down_proj")
    assert expert_layer("model.layers.3", "gate_up_proj", both) == "model.layers.3.mlp.experts.base_layer"
    assert expert_layer("model.layers.3", "down_proj", both) == "model.layers.3.mlp.experts"
    assert expert_layer("model.layers.3", "gate_up_proj", both[:1]) == "model.layers.3.mlp.experts"


def test_a_directory_without_adapters_is_refused(tmp_path: Path) -> None:
    (problem,) = adapter_problems("policy", replace(LORA, adapter_path=str(tmp_path)))
    assert "has no adapter_config.json of peft" in str(problem)
