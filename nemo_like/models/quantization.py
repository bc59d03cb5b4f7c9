"""Reads from config.json whether the weights of a checkpoint are stored in fewer than 16 bits, and how."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

DEQUANTISE = "scripts/dequantise_checkpoint.py writes a checkpoint with weights in 16 bits; name that"
SCALE_SUFFIX = "_scale_inv"  # ends the name of a weight's scales, one for each block of it


class Form(Enum):
    """A form of weights in fewer bits that can be multiplied out when they are read."""

    fp8_blocks = "fp8"  # of DeepSeek: 8 bits, and a scale for each block of a weight
    mxfp4 = "mxfp4"  # of gpt-oss: experts in 4 bits, and a scale for each 32 of them


def quantization(content: Mapping[str, Any]) -> str | None:
    """Return the method by which weights are stored in fewer bits; None where they are not."""
    settings = content.get("quantization_config")
    return str(settings.get("quant_method")) if settings else None


def scaled_block(content: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks of a weight that share a scale, as DeepSeek stores weights in
    8 bits; None where they are stored in another way."""
    block = (content.get("quantization_config") or {}).get("weight_block_size")
    match block:
        case [int(rows), int(columns)] if quantization(content) == Form.fp8_blocks.value:
            return rows, columns
    return None


def stored_form(content: Mapping[str, Any]) -> Form | None:
    """Return the form of weights in fewer bits; None where there are none, and for other forms."""
    if scaled_block(content) is not None:
        return Form.fp8_blocks
    return Form.mxfp4 if quantization(content) == Form.mxfp4.value else None


def refusal_of_quantized(content: Mapping[str, Any], *, reads: Form | None) -> tuple[str, str] | None:
    """Return what is wrong with a trained model's weights in fewer bits, and a remedy; None where they are
    in the form that the trainer ``reads``."""
    method, form = quantization(content), stored_form(content)
    if method is None or (form is not None and form is reads):
        return None
    remedy = "use a checkpoint with weights in 16 bits" if form is None else DEQUANTISE
    return f"has weights in fewer than 16 bits ({method})", remedy
