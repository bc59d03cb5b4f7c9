from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from nemo_like.policy.fsdp.lora import Adapters, add_adapters, checkpoint_name, initial_values
from nemo_like.policy.options import LoraConfig

PARAMETERS = {
    "q_proj.lora_A.default.weight": torch.tensor([[1.0, 2.0, 3.0]]),  # rank 1, 3 inputs
    "q_proj.lora_B.default.weight": torch.tensor([[10.0], [20.0]]),  # 2 outputs
}
DELTA = torch.tensor([[5.0, 10.0, 15.0], [10.0, 20.0, 30.0]])  # 0.5 * B @ A


def adapters(*, is_transposed: bool = False) -> Adapters:
    return Adapters({"q_proj": SimpleNamespace(scaling={"default": 0.5}, fan_in_fan_out=is_transposed)})


def test_a_merged_weight_is_the_weight_plus_the_scaled_product() -> None:
    weight = torch.ones(2, 3, dtype=torch.bfloat16)
    merged = adapters().merged("q_proj.base_layer.weight", weight, PARAMETERS.__getitem__)
    assert torch.equal(merged, 1 + DELTA)
    transposed = adapters(is_transposed=True).merged(
        "q_proj.base_layer.weight", weight.T, PARAMETERS.__getitem__
    )
    assert torch.equal(transposed, 1 + DELTA.T)


@pytest.mark.parametrize("is_transposed", [False, True])
def test_a_parameter_of_all_experts_is_merged_with_an_adapter_per_expert(is_transposed: bool) -> None:
    parameters = {
        "experts.base_layer.lora_A.default.weight": torch.tensor(
            [[1.0, 2.0], [3.0, 4.0]]
        ),  # rank 1, 2 experts
        "experts.base_layer.lora_B.default.weight": torch.tensor([[10.0, 100.0], [20.0, 200.0]]),
    }
    experts = SimpleNamespace(is_transposed=is_transposed)
    layers = {"experts.base_layer": SimpleNamespace(scaling={"default": 0.5}, get_base_layer=lambda: experts)}
    beside = Adapters(layers, experts={"experts.base_layer": "experts.gate_up_proj"})
    name = "experts.base_layer.base_layer.gate_up_proj"
    merged = beside.merged(name, torch.ones(2, 2, 2), parameters.__getitem__)
    first, second = [[5.0, 10.0], [10.0, 20.0]], [[150.0, 200.0], [300.0, 400.0]]
    expected = torch.tensor([first, second])
    assert torch.equal(merged, 1 + (expected.mT if is_transposed else expected))


@pytest.mark.parametrize("name", ["q_proj.base_layer.bias", "k_proj.weight", "norm.weight"])
def test_what_has_no_adapter_stays_as_it_is(name: str) -> None:
    weight = torch.ones(2)
    assert adapters().merged(name, weight, PARAMETERS.__getitem__) is weight


def test_disabled_adapters_add_nothing_and_come_back() -> None:
    layer = SimpleNamespace(scaling={"default": 0.5}, fan_in_fan_out=False)
    with pytest.raises(KeyError), Adapters({"q_proj": layer}).disabled():
        assert layer.scaling == {"default": 0.0}
        raise KeyError
    assert layer.scaling == {"default": 0.5}


def test_parameters_have_the_checkpoints_names_and_adapters_none() -> None:
    assert checkpoint_name("model.layers.0.q_proj.base_layer.weight") == "model.layers.0.q_proj.weight"
    inner = "layers.0.experts.base_layer.base_layer.gate_up_proj"
    assert checkpoint_name(inner) == "layers.0.experts.gate_up_proj"
    assert checkpoint_name("model.norm.weight") == "model.norm.weight"
    assert checkpoint_name("model.layers.0.q_proj.lora_A.default.weight") is None


def test_adapters_start_as_nothing_and_alike_on_every_rank() -> None:
    parameters = {name: nn.Parameter(value) for name, value in PARAMETERS.items()}
    parameters["norm.weight"] = nn.Parameter(torch.ones(3))
    first, second = (initial_values(parameters, None) for _ in range(2))
    assert first.keys() == PARAMETERS.keys()
    assert not first["q_proj.lora_B.default.weight"].any()
    assert first["q_proj.lora_A.default.weight"].any()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_all_linear_layers_but_the_excluded_get_adapters_of_the_chosen_scale() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2))
    lora = LoraConfig(
        enabled=True, rank=4, alpha=6.0, dropout=0.0, target_modules=["all-linear"],
        exclude_modules=["down_proj", "o_proj"], use_rslora=True, adapter_path=None,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"policy\.lora\.exclude_modules=\['last'\]: no layer of the model is"
    ):
        add_adapters(model, "policy", replace(lora, exclude_modules=["last"]))
    named = [*add_adapters(model, "policy", lora).parameter_names()]
    layers = {name.split(".lora_")[0].rpartition(".")[2] for name, _ in named}
    assert layers == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert model.model.layers[0].self_attn.q_proj.scaling == {"default": 3.0}  # 6 / sqrt(4)


@pytest.mark.parametrize(
    ("targets", "parameters", "outside"),
    [
        (["all-linear"], set(), {"q_proj", "k_proj", "v_proj", "o_proj"}),
        (["v_proj", "gate_proj", "up_proj"], {"gate_up_proj"}, {"v_proj"}),
        (["w2"], {"down_proj"}, set()),
    ],
)
def test_in_a_mixture_named_experts_get_adapters_and_routers_never(
    targets: list[str], parameters: set[str], outside: set[str]
) -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 4, "head_dim": 4}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, **experts, num_attention_heads=2, num_key_value_heads=2)
    )
    lora = LoraConfig(
        enabled=True, rank=4, alpha=6.0, dropout=0.0, target_modules=targets,
        exclude_modules=[], use_rslora=False, adapter_path=None,
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"policy\.lora\.target_modules=\['last'\]: no layer of the model is"
    ):
        add_adapters(model, "policy", replace(lora, target_modules=["last"]))
    with pytest.raises(ValueError, match=r"has gate_proj without up_proj"):
        add_adapters(model, "policy", replace(lora, target_modules=["gate_proj"]))
    adapters = add_adapters(model, "policy", lora)
    layers = {name.split(".lora_")[0] for name, _ in adapters.parameter_names()}
    assert {layer.rpartition(".")[2] for layer in layers if "experts" not in layer} == outside
    config = adapters.config
    assert config is not None and not config.rank_pattern
    assert config.target_parameters == {f"experts.{name}" for name in parameters}
    trained = [name for name, value in model.named_parameters() if value.requires_grad]
    assert trained and all(".lora_" in name and "gate." not in name for name in trained)
