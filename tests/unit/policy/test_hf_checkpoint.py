"""From which weight a critic's head starts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_like.policy.backends.hf_checkpoint import value_head


def checkpoint(path: Path, **tensors: torch.Tensor) -> Path:
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({"model.norm.weight": torch.ones(4), **named}, path / "model.safetensors")
    return path


def test_a_reward_model_gives_its_own_head(tmp_path: Path) -> None:
    head = torch.tensor([[1.0, -2.0, 0.5, 0.0]], dtype=torch.bfloat16)
    found = value_head(checkpoint(tmp_path, score__weight=head), 4)
    assert found.dtype == torch.float32
    assert found.tolist() == [[1.0, -2.0, 0.5, 0.0]]


def test_a_language_model_has_none_so_every_value_is_0(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, lm_head__weight=torch.ones(9, 4))
    assert value_head(path, 4).tolist() == [[0.0] * 4]


@pytest.mark.parametrize("shape", [(2, 4), (1, 5), (4,)])
def test_a_head_that_is_no_value_is_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    path = checkpoint(tmp_path, score__weight=torch.ones(shape))
    with pytest.raises(ValueError, match=r"score\.weight of .* is \[.*\[1, 4\]; use a reward model with one"):
        value_head(path, 4)
