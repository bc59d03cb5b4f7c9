"""What is recorded of an engine's modules, whatever vLLM's models call them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from nemo_like.mismatch import engine_hooks


class TransformersForCausalLM(nn.Module):
    """As vLLM's Transformers backend names its models."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.self_attn = nn.Module()
        layer.self_attn.o_proj = nn.Identity()
        layer.post_feedforward_layernorm = nn.Identity()
        self.layers = nn.ModuleList([layer])


class GptOssForCausalLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.Module()
        layer.attn, layer.mlp = nn.Module(), nn.Module()
        layer.attn.o_proj, layer.mlp.router = nn.Identity(), nn.Identity()
        self.layers, self.embedding = nn.ModuleList([layer]), nn.Identity()


def recorded(model: nn.Module, *values: tuple[nn.Module, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What is recorded where each of the modules gets its values."""
    worker = SimpleNamespace(get_model=lambda: model)
    engine_hooks.begin_trace(worker)
    recorder = vars(worker)[engine_hooks._ATTRIBUTE]
    for module, tensor in values:
        module(tensor)
    recorder.stop()
    return {name: torch.cat(parts) for name, parts in recorder.parts.items()}


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_modules_of_transformers_have_a_batch_of_one_sample(num_tokens: int) -> None:
    model = TransformersForCausalLM()
    layer, values = model.layers[0], torch.arange(2.0 * num_tokens).reshape(1, num_tokens, 2)
    found = recorded(model, (layer.self_attn.o_proj, values[0]), (layer.post_feedforward_layernorm, values))
    assert found.keys() == {"layers.0.self_attn.o_proj", "layers.0.post_feedforward_layernorm"}
    assert all(torch.equal(one, values[0]) for one in found.values())


def test_modules_of_gpt_oss_have_the_usual_names() -> None:
    model = GptOssForCausalLM()
    layer, values = model.layers[0], torch.ones(3, 2)
    modules = (model.embedding, layer.attn.o_proj, layer.mlp.router)
    found = recorded(model, *((module, values) for module in modules))
    assert found.keys() == {"embed_tokens", "layers.0.self_attn.o_proj", "layers.0.mlp.gate"}
