"""Weights in MXFP4 by hand, blocks of 32 values of four bits with a scale, and experts in stacks of them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint
from nemo_like.policy.backends.hf_export import stacked_experts
from nemo_like.policy.backends.mxfp4 import from_mxfp4

STACK = "model.layers.0.mlp.experts.down_proj"
# Every value of four bits twice, the one in a byte's lower bits first: 0x10 has 0 and then 1.
BLOCK = [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 2
VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
VALUES = [*VALUES, *(-value for value in VALUES)] * 2


def test_values_are_a_sign_two_bits_of_exponent_and_one_of_mantissa_times_a_power_of_two() -> None:
    """A scale of 127 is 1, of 130 is 8, of 120 is 1/128."""
    blocks = torch.tensor([[BLOCK, BLOCK], [BLOCK, BLOCK]], dtype=torch.uint8)
    scales = torch.tensor([[127, 130], [120, 127]], dtype=torch.uint8)
    found = from_mxfp4(blocks, scales)
    assert found.dtype is torch.bfloat16
    assert found[0].tolist() == [*VALUES, *(8 * value for value in VALUES)]
    assert found[1].tolist() == [*(value / 128 for value in VALUES), *VALUES]


def stacks() -> dict[str, Tensor]:
    """Two experts with two outputs for 32 inputs; the second one's scales are twice those of the first."""
    blocks = torch.tensor(BLOCK, dtype=torch.uint8).expand(2, 2, 1, 16).contiguous()
    scales = torch.tensor([[[127], [128]], [[128], [129]]], dtype=torch.uint8)
    return {f"{STACK}_blocks": blocks, f"{STACK}_scales": scales, f"{STACK}_bias": torch.eye(2)}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    save_file(stacks(), path / "model.safetensors", metadata={"format": "pt"})
    sizes = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_local_experts"
    config = {
        **dict.fromkeys(sizes.split(), 2),
        "model_type": "gpt_oss",
        "max_position_embeddings": 64,
        "num_experts_per_tok": 1,
        "quantization_config": {"quant_method": "mxfp4"},
    }
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_an_experts_part_of_a_stack_has_a_column_per_output(checkpoint: Path) -> None:
    found = HFCheckpoint(checkpoint)
    expert = found["model.layers.0.mlp.experts.1.down_proj"]
    assert expert.shape == (32, 2)
    assert expert.t().tolist() == [[2 * value for value in VALUES], [4 * value for value in VALUES]]
    assert found["model.layers.0.mlp.experts.1.down_proj_bias"].tolist() == [0, 1]
    with pytest.raises(KeyError, match=r"experts\.0\.up_proj"):
        found["model.layers.0.mlp.experts.0.up_proj"]


def test_experts_are_stacked_once_all_have_come() -> None:
    tensors = [
        ("model.layers.0.mlp.experts.1.down_proj", torch.tensor([3.0])),
        ("model.norm.weight", torch.tensor([9.0])),
        ("model.layers.1.mlp.experts.0.down_proj", torch.tensor([5.0])),
        ("model.layers.0.mlp.experts.0.down_proj", torch.tensor([1.0])),
        ("model.layers.1.mlp.experts.1.down_proj", torch.tensor([7.0])),
    ]
    found = [(name, tensor.tolist()) for name, tensor in stacked_experts(tensors, 2)]
    assert found == [
        ("model.norm.weight", [9.0]),
        (STACK, [[1.0], [3.0]]),
        (STACK.replace("0", "1"), [[5.0], [7.0]]),
    ]


def test_a_checkpoint_is_written_once_in_bfloat16(checkpoint: Path, tmp_path: Path) -> None:
    output = tmp_path / "plain"
    command = [sys.executable, "scripts/dequantise_checkpoint.py", str(checkpoint), "--output", str(output)]
    assert subprocess.run(command, check=False).returncode == 0
    config = json.loads((output / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and "quantization_config" not in config
    tensors = load_file(output / "model.safetensors")
    assert tensors.keys() == {STACK, f"{STACK}_bias"}
    assert tensors[STACK][1].equal(HFCheckpoint(checkpoint)["model.layers.0.mlp.experts.1.down_proj"])
