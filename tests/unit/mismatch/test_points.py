from __future__ import annotations

import pytest

from nemo_like.mismatch.points import in_order, point


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
