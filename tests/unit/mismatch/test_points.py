from __future__ import annotations

import pytest

from nemo_like.mismatch.points import in_order, point, point_of_weight


def test_points_are_in_the_order_in_which_a_model_computes_them() -> None:
    names = [
        "embed_tokens",
        "layers.2.input",
        "layers.2.self_attn.q_proj",
        "layers.2.after_attention",
        "layers.10.input",
        "after_layers",
        "norm",
        "logprobs",
    ]
    assert [one.name for one in in_order(reversed(names))] == names


def test_a_point_names_what_it_reads_in_its_own_layer() -> None:
    assert point("layers.3.mlp.down_proj").source == "layers.3.mlp.activation"
    assert point("logprobs").source == "norm"
    assert point("layers.3.input").beside("mlp.gate") == "layers.3.mlp.gate"


@pytest.mark.parametrize("name", ["rotary_emb", "layers.3.self_attn.bias", "layers.x.input"])
def test_other_names_are_no_points(name: str) -> None:
    with pytest.raises(KeyError):
        point(name)


@pytest.mark.parametrize(
    ("weight", "name"),
    [
        ("lm_head.weight", "logprobs"),
        ("model.embed_tokens.weight", "embed_tokens"),
        ("model.layers.3.self_attn.q_proj.bias", "layers.3.self_attn.q_proj"),
        ("model.layers.3.self_attn.qkv_proj.weight", "layers.3.self_attn.q_proj"),
        ("model.layers.3.self_attn.sinks", "layers.3.self_attn.attention"),
        ("model.layers.3.block_sparse_moe.gate.weight", "layers.3.mlp.gate"),
        ("model.layers.3.block_sparse_moe.experts.7.w1.weight", "layers.3.mlp.experts"),
        ("model.layers.3.mlp.router.bias", "layers.3.mlp.gate"),
        ("model.layers.3.mlp.experts.gate_up_proj_bias", "layers.3.mlp.experts"),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", None),
        ("model.vision.patch.weight", None),
    ],
)
def test_a_weight_is_used_at_a_point_whatever_the_family_calls_it(weight: str, name: str | None) -> None:
    assert point_of_weight(weight) == name
