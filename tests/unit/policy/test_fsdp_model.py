from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from nemo_like.config.schema import Config
from nemo_like.policy.fsdp.attention import has_plain_attention
from nemo_like.policy.fsdp.model import empty_model, materialise


def test_a_model_names_the_class_of_its_layers(checkpoint: Path) -> None:
    model = empty_model(checkpoint)
    assert {type(layer).__name__ for layer in model.get_decoder().layers} == {*model._no_split_modules}


def test_transformers_says_which_attention_can_be_replaced(checkpoint: Path) -> None:
    assert has_plain_attention(empty_model(checkpoint))


def test_buffers_keep_their_values_and_stay_out_of_checkpoints_when_memory_comes(
    demo: Callable[..., Config],
) -> None:
    model = nn.ModuleDict({"rotary": nn.Module(), "linear": nn.Linear(2, 2, device="meta")})
    model["rotary"].register_buffer("frequencies", torch.tensor([3.0, 4.0]), persistent=False)
    materialise(model, torch.device("cpu"), demo().policy.fsdp_cfg)
    assert model["rotary"].frequencies.tolist() == [3.0, 4.0]
    assert dict(model.named_buffers()).keys() == {"rotary.frequencies"}
    assert model.state_dict().keys() == {"linear.weight", "linear.bias"}
    assert not any(parameter.is_meta for parameter in model.parameters())
