#!/usr/bin/env python
"""Make the pictures of the counting task, and the tiny vision-language checkpoint that learns it.

    python scripts/prepare_shapes.py --output .cache/models/shapes-s1 --data .cache/data/shapes --seed 1

The script teaches a model of 660k parameters to count red circles until it is right in about two of five
cases; GRPO does the rest. That takes some 10 to 30 seconds on one core. What is already there is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The model is so small that more threads only wait for each other. torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TARGET_ACCURACY = 0.4
# Training and validation share no picture: each of them is drawn with another seed.
_NUM_TRAIN, _NUM_VALIDATION = 3072, 512
_TRAIN_SEED, _VALIDATION_SEED = 20_000, 30_000


def main(arguments: list[str] | None = None) -> int:
    """Make what is not there yet. Returns the exit code: 0 when all is there in the end, 1 otherwise."""
    from scripts.demo_model.preparation import prepare

    return prepare(__doc__, "directory of pictures and problems to make", make_data, make_model, arguments)


def make_data(directory: Path) -> None:
    """Draw the pictures of training and validation, so that ``directory`` is whole or not there."""
    from scripts.demo_model.making import whole_directory
    from scripts.demo_model.shapes import SIDE, write_records

    with whole_directory(directory) as aside:
        write_records(aside, "train", _NUM_TRAIN, _TRAIN_SEED, SIDE)
        write_records(aside, "validation", _NUM_VALIDATION, _VALIDATION_SEED, SIDE)
    print(f"{directory}: {_NUM_TRAIN} pictures to train on and {_NUM_VALIDATION} held out.")


def make_model(output: Path, seed: int) -> None:
    """Train a model and write its checkpoint, so that ``output`` is whole or not there."""
    print(f"Teaching a tiny Qwen2.5-VL to count red circles, until {TARGET_ACCURACY:.0%} are right ...")
    import torch
    from transformers.utils import logging

    from scripts.demo_model.making import shown, whole_directory
    from scripts.demo_model.tiny_vlm import save_vlm
    from scripts.demo_model.warm_start_vlm import warm_start

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with shown(TARGET_ACCURACY) as show:
        result = warm_start(seed, TARGET_ACCURACY, show)
    with whole_directory(output) as aside:
        save_vlm(result.model, aside)
    print(f"{output}: {result.accuracy:.0%} right after {result.steps} steps, {result.seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
