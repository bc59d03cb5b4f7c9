from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.configuration import Config
from nemo_like.policy.fsdp.attention import has_plain_attention
from nemo_like.policy.fsdp.lora import add_adapters
from nemo_like.policy.fsdp.model import ScoringCausalLM, empty_model, materialise


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


def test_every_row_of_an_embedding_trains_the_padding_tokens_too(checkpoint: Path) -> None:
    path = checkpoint / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": 3}))
    embeddings = [part for part in empty_model(checkpoint).modules() if isinstance(part, nn.Embedding)]
    assert [embedding.padding_idx for embedding in embeddings] == [None]
    embedding = embeddings[0].to_empty(device="cpu")
    embedding(torch.tensor([2, 3, 3])).sum().backward()
    assert embedding.weight.grad is not None
    assert embedding.weight.grad[:5, 0].tolist() == [0.0, 0.0, 1.0, 2.0, 0.0]


def test_only_recomputation_and_the_dropout_of_adapters_begin_with_training(
    checkpoint: Path, demo: Callable[..., Config]
) -> None:
    causal_lm = empty_model(checkpoint)
    lora = demo().policy.lora
    add_adapters(causal_lm, "policy", replace(lora, enabled=True, dropout=0.5, target_modules=["q_proj"]))
    model = ScoringCausalLM(causal_lm, LogprobSettings(temperature=1.0), None, None)
    training = {name for name, module in causal_lm.named_modules() if module.training}
    layers = {f"model.layers.{number}" for number in range(len(causal_lm.get_decoder().layers))}
    assert {name for name in training if ".lora_dropout." not in name} == layers
    assert {name.partition(".lora_dropout.")[0] for name in training - layers} == {
        f"{layer}.self_attn.q_proj" for layer in layers
    }
    assert model.training
    model.eval()
    assert not any(module.training for module in model.modules())
