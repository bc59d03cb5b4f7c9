from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_like.policy.fsdp.lora import Adapters, checkpoint_name, initial_values

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
    assert checkpoint_name("model.norm.weight") == "model.norm.weight"
    assert checkpoint_name("model.layers.0.q_proj.lora_A.default.weight") is None


def test_adapters_start_as_nothing_and_alike_on_every_rank() -> None:
    parameters = {name: nn.Parameter(value) for name, value in PARAMETERS.items()}
    parameters["norm.weight"] = nn.Parameter(torch.ones(3))
    first, second = initial_values(parameters), initial_values(parameters)
    assert first.keys() == PARAMETERS.keys()
    assert not first["q_proj.lora_B.default.weight"].any()
    assert first["q_proj.lora_A.default.weight"].any()
    assert all(torch.equal(first[name], second[name]) for name in first)
