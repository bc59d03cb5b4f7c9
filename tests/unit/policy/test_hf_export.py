"""What an exported checkpoint says of itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from nemo_like.policy.backends.hf_export import complete_checkpoint, write_weights


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_config_json_has_the_dtype_of_the_weights_and_none_of_the_sources_quantization(
    key: str, tmp_path: Path
) -> None:
    source, path = tmp_path / "source", tmp_path / "exported"
    source.mkdir()
    content = {"hidden_size": 4, key: "float32", "quantization_config": {"quant_method": "fp8"}}
    (source / "config.json").write_text(json.dumps(content))
    written = write_weights(path, 0, iter([("norm.weight", torch.ones(4))]))
    complete_checkpoint(path, source, [written], torch.bfloat16)
    assert json.loads((path / "config.json").read_text()) == {"hidden_size": 4, key: "bfloat16"}
    assert sorted(file.name for file in path.iterdir()) == ["config.json", "model.safetensors"]
