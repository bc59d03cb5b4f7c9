#!/usr/bin/env python
"""Write a checkpoint with weights in 8 bits, such as those of DeepSeek-V3 and Kimi-K2, in 16 bits, or one
with experts in MXFP4, as those of gpt-oss are published.

    python scripts/dequantise_checkpoint.py models/DeepSeek-V3 --output models/DeepSeek-V3-bf16

The trainer reads both. Engines get the trainer's weights, so they need the one in 16 bits.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

from nemo_like.models.model_info import config_of
from nemo_like.models.quantization import Form, stored_form
from nemo_like.observability.disk import DiskFull, whole_directory
from nemo_like.observability.printable import accept_all_characters
from nemo_like.policy.backends.hf_checkpoint import HFCheckpoint
from nemo_like.policy.backends.hf_export import complete_checkpoint, write_weights

# By how much a checkpoint grows at most.
_GROWTH = {Form.fp8_blocks: 2, Form.mxfp4: 4}


def main() -> int:
    accept_all_characters()
    options = parse()
    try:
        form = stored_form(config_of(str(options.source)))
        if form is None:
            raise ValueError(
                f"{options.source} has no weights in 8 bits with a scale for each block, or in MXFP4"
            )
        if options.output.exists():
            raise ValueError(f"--output {options.output} exists already; name a new directory")
        dequantise(options.source, options.output, form)
    except (ValueError, DiskFull, OSError) as error:
        print(f"dequantise_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"{options.source} is in {options.output}, with weights in bfloat16")
    return 0


def dequantise(source: Path, output: Path, form: Form) -> None:
    """Write the checkpoint one tensor after the other; the directory appears once it is complete."""
    checkpoint = HFCheckpoint(source)
    num_bytes = _GROWTH[form] * sum(file.stat().st_size for file in source.glob("*.safetensors"))
    with whole_directory(output, "the checkpoint in 16 bits", num_bytes) as path:
        written = write_weights(path, 0, tensors(checkpoint))
        complete_checkpoint(path, source, [written], torch.bfloat16)


def tensors(checkpoint: HFCheckpoint) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors by name: those with scales in bfloat16, the others as they are."""
    for name in checkpoint.names():
        yield name, checkpoint[name].to(torch.bfloat16) if checkpoint.has_scales(name) else checkpoint[name]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("source", type=Path, help="the checkpoint's directory")
    parser.add_argument("--output", type=Path, required=True, help="a new directory")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
