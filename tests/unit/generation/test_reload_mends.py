"""What vLLM's reload would lose of gpt-oss, and of loaders without a name."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from nemo_like.generation.reload_mends import DirectParameters


class GptOssForCausalLM(torch.nn.Module):
    """The parts of vLLM's model of this name that it copies into."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = torch.nn.Module()
        self.attn.sinks = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
        self.o_proj = torch.nn.Linear(2, 2)


def stack() -> list[tuple[str, Tensor]]:
    norm = ("model.norm.weight", torch.ones(2))
    return [norm, ("model.layers.0.mlp.experts.down_proj_bias", torch.tensor([[1.0], [3.0]]))]


def test_a_models_own_sinks_are_there_to_be_copied_into() -> None:
    model = GptOssForCausalLM()
    own = model.attn.sinks
    direct = DirectParameters(model)
    model.attn.sinks = torch.nn.Parameter(own.detach().to("meta"))
    direct.put_back()
    model.attn.sinks.data.copy_(torch.tensor([5.0, 6.0]))
    assert model.attn.sinks is own and own.tolist() == [5, 6]


def test_experts_of_gpt_oss_go_to_vllm_one_by_one() -> None:
    found = [(name, one.tolist()) for name, one in DirectParameters(GptOssForCausalLM()).single(stack())]
    assert found == [
        ("model.norm.weight", [1, 1]),
        ("model.layers.0.mlp.experts.0.down_proj_bias", [1]),
        ("model.layers.0.mlp.experts.1.down_proj_bias", [3]),
    ]


def test_stacks_of_other_models_are_left_whole() -> None:
    tensors = stack()
    assert DirectParameters(torch.nn.Linear(2, 2)).single(tensors) is tensors


def test_a_loader_that_is_part_of_another_gets_a_name() -> None:
    model = GptOssForCausalLM()
    model.o_proj.weight.weight_loader = partial(print, "weight")
    DirectParameters(model)
    assert model.o_proj.weight.weight_loader.__name__ == "partial"
