from __future__ import annotations

import pytest
import torch

from nemo_like.policy.loss.updated_tensors import is_matrix


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("decoder.layers.0.mlp.experts.weight1", (4, 6, 3), True),
        ("decoder.layers.0.mlp.experts.linear_fc1.bias", (4, 6), False),
        ("model.layers.0.mlp.experts.gate_up_proj_bias", (4, 6), False),
        ("model.layers.0.self_attn.q_proj.weight", (6, 3), True),
        ("model.layers.0.self_attn.sinks", (4,), False),
    ],
)
def test_biases_of_all_experts_are_no_matrix(name: str, shape: tuple[int, ...], expected: bool) -> None:
    assert is_matrix(name, torch.empty(shape)) is expected
