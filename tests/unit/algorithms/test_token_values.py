from __future__ import annotations

import torch

from nemo_like.algorithms.token_values import TokenValues, linear_values


def test_a_value_is_the_heads_product_with_the_hidden_state_in_float32() -> None:
    # In bfloat16 256 + 1 would be 256.
    hidden = torch.tensor([[256.0, 1.0], [2.0, -1.0]], dtype=torch.bfloat16)
    found = linear_values(hidden, torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)).values
    assert found.dtype == torch.float32
    assert found.tolist() == [257.0, 1.0]


def test_values_are_made_anew_of_their_tensors() -> None:
    values = TokenValues(torch.tensor([1.0, 2.0]))
    assert TokenValues.of(values.tensors) == values
