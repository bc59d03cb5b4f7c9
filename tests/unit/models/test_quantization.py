"""In what form a checkpoint's weights are stored, by its config.json."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_like.models.quantization import (
    DEQUANTISE,
    Form,
    quantization,
    refusal_of_quantized,
    scaled_block,
    stored_form,
)

DEEPSEEK = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 64]}}


@pytest.mark.parametrize("content", [{}, {"quantization_config": None}])
def test_weights_are_usually_in_16_bits(content: dict[str, Any]) -> None:
    assert quantization(content) is None and scaled_block(content) is None
    assert stored_form(content) is None and refusal_of_quantized(content, reads=None) is None


@pytest.mark.parametrize(
    ("content", "form", "method", "block"),
    [
        (DEEPSEEK, Form.fp8_blocks, "fp8", (128, 64)),
        ({"quantization_config": {"quant_method": "mxfp4"}}, Form.mxfp4, "mxfp4", None),
    ],
)
def test_two_forms_are_read_or_can_be_made_16_bits(
    content: dict[str, Any], form: Form, method: str, block: tuple[int, int] | None
) -> None:
    assert (quantization(content), stored_form(content), scaled_block(content)) == (method, form, block)
    assert refusal_of_quantized(content, reads=form) is None
    (other,) = {*Form} - {form}
    for reads in (None, other):
        rule, remedy = refusal_of_quantized(content, reads=reads) or ("", "")
        assert (rule, remedy) == (f"has weights in fewer than 16 bits ({method})", DEQUANTISE)


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": 128},
    ],
)
def test_other_forms_are_not_read(settings: dict[str, Any]) -> None:
    content = {"quantization_config": settings}
    assert stored_form(content) is None
    rule, remedy = refusal_of_quantized(content, reads=Form.fp8_blocks) or ("", "")
    assert rule == f"has weights in fewer than 16 bits ({settings['quant_method']})"
    assert remedy == "use a checkpoint with weights in 16 bits"
