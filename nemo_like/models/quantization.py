"""Reads from config.json whether the weights of a checkpoint are stored in fewer than 16 bits, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

DEQUANTISE = "scripts/dequantise_checkpoint.py writes a checkpoint with weights in 16 bits; name that"
SCALE_SUFFIX = "_scale_inv"  # ends the name of a weight's scales, one for each block of it


def quantization(content: Mapping[str, Any]) -> str | None:
    """Return the method by which weights are stored in fewer bits; None where they are not."""
    settings = content.get("quantization_config")
    return str(settings.get("quant_method")) if settings else None


def scaled_block(content: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of the blocks of a weight that share a scale, as DeepSeek stores weights in
    8 bits; None where they are stored in another way."""
    settings = content.get("quantization_config") or {}
    block = settings.get("weight_block_size")
    if settings.get("quant_method") != "fp8" or not block:
        return None
    rows, columns = block
    return rows, columns


def refusal_of_quantized(content: Mapping[str, Any], *, reads_blocks: bool) -> tuple[str, str] | None:
    """Return what is wrong with a trained model's weights in fewer bits, and a remedy; None where they are
    read."""
    method, block = quantization(content), scaled_block(content)
    if method is None or (reads_blocks and block is not None):
        return None
    remedy = "use a checkpoint with weights in 16 bits" if block is None else DEQUANTISE
    return f"has weights in fewer than 16 bits ({method})", remedy
