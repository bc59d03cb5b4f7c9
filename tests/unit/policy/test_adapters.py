from __future__ import annotations

import json
from pathlib import Path

import torch
from peft import PeftConfig
from safetensors.torch import load_file

from nemo_like.policy.backends.adapters import (
    LORA_A,
    LORA_B,
    adapter_config,
    initial_value,
    peft_config,
    peft_name,
    write_adapters,
)
from nemo_like.policy.options import LoraConfig

LORA = LoraConfig(enabled=True, rank=2, alpha=6.0, dropout=0.1, target_modules=["q_proj", "v_proj"])
LAYER = "model.layers.0.self_attn.q_proj"


def test_a_layers_name_alone_decides_its_adapters_first_values() -> None:
    name = peft_name(LAYER, LORA_A)
    first, again = (initial_value(name, (2, 100)) for _ in range(2))
    assert torch.equal(first, again)
    assert not torch.equal(first, initial_value(name.replace("0", "1"), (2, 100)))
    # Uniform within 1 / sqrt(inputs), as peft draws them.
    assert 0.09 < first.abs().max() < 0.1 and abs(first.mean()) < 0.02
    assert not initial_value(peft_name(LAYER, LORA_B), (100, 2)).any()


def test_peft_reads_the_configuration_that_is_written(tmp_path: Path) -> None:
    config = adapter_config(peft_config(LORA, LORA.target_modules), tmp_path / "base")
    assert config == json.loads(json.dumps(config))
    name = peft_name(LAYER, LORA_A)
    assert name == "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    write_adapters(tmp_path / "adapter", config, {name: torch.ones(2, 3)})
    modes = {path.stat().st_mode for path in (tmp_path / "adapter").iterdir()}
    assert len(modes) == 1  # weights can be read by whoever reads their configuration
    read = PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (read.r, read.lora_alpha, read.lora_dropout) == (2, 6.0, 0.1)
    assert set(read.target_modules) == {"q_proj", "v_proj"}
    assert read.base_model_name_or_path == str(tmp_path / "base")
    assert load_file(tmp_path / "adapter" / "adapter_model.safetensors")[name].shape == (2, 3)
