"""What is read of a checkpoint: weights in 8 bits, and the weight from which a critic's head starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint, dequantised, value_head


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


def test_each_block_is_multiplied_by_its_scale_and_the_last_ones_may_be_small() -> None:
    """3 x 5 values in blocks of 2 x 2: 2 rows and 3 columns of scales."""
    weight = torch.arange(1.0, 16.0).view(3, 5)
    scales = torch.tensor([[1.0, 10.0, 0.5], [2.0, 3.0, 100.0]])
    assert dequantised(weight, scales, (2, 2)).tolist() == [
        [1, 2, 30, 40, 2.5],
        [6, 7, 80, 90, 5],
        [22, 24, 39, 42, 1500],
    ]


def test_a_weight_in_8_bits_is_read_with_its_scales_and_others_are_as_they_are(tmp_path: Path) -> None:
    """Blocks as DeepSeek has them, of 128 x 128."""
    weight = torch.full((130, 200), 1.5).to(torch.float8_e4m3fn)
    weight[129, 199] = -448.0
    scales = torch.tensor([[2.0, 4.0], [0.25, 0.5]])
    tensors = {"a.weight": weight, "a.weight_scale_inv": scales, "b.weight": torch.ones(2, 2).bfloat16()}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    found = HFCheckpoint(tmp_path)
    read = found["a.weight"]
    assert read.dtype is torch.float32 and read.shape == (130, 200)
    corners = [read[0, 0], read[127, 128], read[128, 127], read[128, 128], read[129, 199]]
    assert [value.item() for value in corners] == [3.0, 6.0, 0.375, 0.75, -224.0]
    assert found["b.weight"].dtype is torch.bfloat16
    assert sorted(found.names()) == ["a.weight", "b.weight"]
