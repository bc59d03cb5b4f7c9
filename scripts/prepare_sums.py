#!/usr/bin/env python
"""Make the problems of the agent's task, sums of three numbers, and the tiny checkpoint that learns it.

    python scripts/prepare_sums.py --output .cache/models/sums-s1 --data .cache/data/sums --seed 1

The script teaches a model of 410k parameters to call a calculator until it makes all calls of about one
problem in four; GRPO does the rest. That takes some 20 seconds on one core. What is already there is kept.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The model is so small that more threads only wait for each other. torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

TARGET_ACCURACY = 0.25
_NUM_TRAIN, _NUM_VALIDATION = 8192, 512


def main(arguments: list[str] | None = None) -> int:
    """Make what is not there yet. Returns the exit code: 0 when all is there in the end, 1 otherwise."""
    from scripts.demo_model.preparation import prepare

    return prepare(__doc__, "directory of problems to make", make_data, make_model, arguments)


def make_data(directory: Path) -> None:
    """Write the problems of training and validation, so that ``directory`` is whole or not there."""
    from scripts.demo_model.making import whole_directory
    from scripts.demo_model.sums import write_records

    with whole_directory(directory) as aside:
        write_records(aside, "train", _NUM_TRAIN, held_out=False)
        write_records(aside, "validation", _NUM_VALIDATION, held_out=True)
    print(f"{directory}: {_NUM_TRAIN} problems to train on and {_NUM_VALIDATION} held out.")


def make_model(output: Path, seed: int) -> None:
    """Train a model and write its checkpoint, so that ``output`` is whole or not there."""
    print(f"Teaching a tiny Qwen3 to call a calculator, until {TARGET_ACCURACY:.0%} are right ...")
    import torch
    from transformers.utils import logging

    from scripts.demo_model.making import shown, whole_directory
    from scripts.demo_model.tool_tokenizer import save_tokenizer
    from scripts.demo_model.warm_start_tools import warm_start

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with shown(TARGET_ACCURACY) as show:
        result = warm_start(seed, TARGET_ACCURACY, show)
    with whole_directory(output) as aside:
        result.model.save_pretrained(aside)
        save_tokenizer(aside)
    print(f"{output}: {result.accuracy:.0%} right after {result.steps} steps, {result.seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
