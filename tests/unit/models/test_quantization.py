"""In what form a checkpoint's weights are stored, by its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.models.quantization import DEQUANTISE, quantization, refusal_of_quantized, scaled_block

DEEPSEEK = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}}


@pytest.mark.parametrize("content", [{}, {"quantization_config": None}])
def test_weights_are_usually_in_16_bits(content: dict[str, Any]) -> None:
    assert quantization(content) is None and scaled_block(content) is None
    assert refusal_of_quantized(content, reads_blocks=False) is None


def test_blocks_in_8_bits_are_read_or_can_be_made_16_bits() -> None:
    assert (quantization(DEEPSEEK), scaled_block(DEEPSEEK)) == ("fp8", (128, 64))
    assert refusal_of_quantized(DEEPSEEK, reads_blocks=True) is None
    rule, remedy = refusal_of_quantized(DEEPSEEK, reads_blocks=False) or ("", "")
    assert (rule, remedy) == ("has weights in fewer than 16 bits (fp8)", DEQUANTISE)


@pytest.mark.parametrize("settings", [{"quant_method": "gptq", "bits": 4}, {"quant_method": "fp8"}])
def test_other_forms_are_not_read(settings: dict[str, Any]) -> None:
    content = {"quantization_config": settings}
    assert scaled_block(content) is None
    rule, remedy = refusal_of_quantized(content, reads_blocks=True) or ("", "")
    assert rule == f"has weights in fewer than 16 bits ({settings['quant_method']})"
    assert remedy == "use a checkpoint with weights in 16 bits"
