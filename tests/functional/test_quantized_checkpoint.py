"""A checkpoint with weights in 8 bits trains as its weights in 16 bits do, and can be written in 16 bits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from nemo_like.policy.groups.parallelism import parallel_layout
from tests.functional.policy_fixtures import make_checkpoint, policy_config
from tests.functional.test_family_parity import export_all
from tests.functional.worlds import run_world
from tests.unit.config.checkpoints import REPOSITORY

BLOCK = 16
LARGEST = torch.finfo(torch.float8_e4m3fn).max
_KEPT = ("embed_tokens", "lm_head", "norm", "mlp.gate.")  # of which DeepSeek's checkpoints have 16 bits


def per_block(weight: Tensor) -> Tensor:
    """The largest absolute value in each block of 16 x 16."""
    rows = [part.abs().split(BLOCK, dim=1) for part in weight.split(BLOCK)]
    return torch.tensor([[block.max().item() for block in row] for row in rows])


def spread(scales: Tensor, weight: Tensor) -> Tensor:
    """Each block's scale at all of its values, by a Kronecker product with ones."""
    return torch.kron(scales, torch.ones(BLOCK, BLOCK))[: weight.shape[0], : weight.shape[1]]


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """A tiny DeepSeek-V3 in 8 bits, and what its weights are in float32."""
    path = make_checkpoint(tmp_path_factory.mktemp("fp8") / "model", "deepseek_v3", tied=False)
    stored, meant = {}, {}
    for name, weight in load_file(path / "model.safetensors").items():
        if weight.ndim == 1 or any(kept in name for kept in _KEPT):
            stored[name] = meant[name] = weight
            continue
        scales = per_block(weight) / LARGEST
        stored[name] = (weight / spread(scales, weight)).to(torch.float8_e4m3fn)
        stored[f"{name}_scale_inv"] = scales
        meant[name] = stored[name].float() * spread(scales, weight)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config))
    return path, meant


def assert_holds(path: Path, expected: dict[str, Tensor]) -> None:
    found = load_file(path / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [name for name, tensor in found.items() if not torch.equal(tensor, expected[name])] == []
    assert "quantization_config" not in json.loads((path / "config.json").read_text())


def test_the_trainer_reads_the_products_with_the_scales(quantized: tuple[Path, dict[str, Tensor]]) -> None:
    path, meant = quantized
    run_world(export_all, parallel_layout(policy_config(path)), {"it": path}, {})
    assert_holds(Path(f"{path}-exported"), meant)


def test_the_script_writes_them_in_16_bits(quantized: tuple[Path, dict[str, Tensor]], tmp_path: Path) -> None:
    path, meant = quantized
    program = [sys.executable, str(REPOSITORY / "scripts/dequantise_checkpoint.py")]
    arguments = [str(path), "--output", str(tmp_path / "bf16")]
    done = subprocess.run([*program, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = {
        name: tensor.bfloat16() if tensor.ndim > 1 and not any(kept in name for kept in _KEPT) else tensor
        for name, tensor in meant.items()
    }
    assert_holds(tmp_path / "bf16", expected)
    again = subprocess.run(
        [*program, str(tmp_path / "bf16"), "--output", "x"], capture_output=True, text=True
    )
    assert (again.returncode, again.stdout) == (2, "")
    assert "has no weights in 8 bits with a scale for each block, or in MXFP4" in again.stderr
