#!/usr/bin/env python
"""Make the tiny Qwen3 checkpoint of the arithmetic task.

    python scripts/prepare_arithmetic.py --output .cache/models/arithmetic-d2-s1 --digits 2 --seed 1

The script teaches a model of 402k parameters addition until it solves about a third of the held-out
problems; GRPO does the rest. That takes some 10 to 20 seconds on one core. A checkpoint that is already
there is kept.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

# The model is so small that more threads only wait for each other. torch reads this when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

RECORD_FILE = "warm_start.json"
CHECKPOINT_FILES = (
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    RECORD_FILE,
)
TARGET_ACCURACY = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How a checkpoint was made; the checkpoint holds it as ``warm_start.json``."""

    digits: int
    seed: int
    accuracy: float  # share of held-out problems right when sampled at temperature 1
    steps: int
    seconds: float


def main(arguments: list[str] | None = None) -> int:
    """Make the checkpoint unless it is there. Returns the exit code: 0 when it is there in the end, 1 when it
    cannot be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--digits", type=int, default=2, help="digits per operand, 1 to 3 (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of initialisation and data (default 1)")
    options = parser.parse_args(arguments)
    try:
        if is_there(options.output, options.digits, options.seed):
            print(f"{options.output} is already there; nothing to do.")
            return 0
        make(options.output, options.digits, options.seed)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def is_there(output: Path, digits: int, seed: int) -> bool:
    """Return whether ``output`` is a complete checkpoint of these settings.

    Raises ValueError when something else is in its place.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return False
    missing = [name for name in CHECKPOINT_FILES if not (output / name).is_file()]
    if missing:
        raise ValueError(
            f"{output} exists but is no complete checkpoint, {', '.join(missing)} missing; "
            "remove it or choose another --output"
        )
    record = Record(**json.loads((output / RECORD_FILE).read_text(encoding="utf-8")))
    if (record.digits, record.seed) != (digits, seed):
        raise ValueError(
            f"{output} was made with --digits {record.digits} --seed {record.seed}, not --digits {digits} "
            f"--seed {seed}; remove it or choose another --output"
        )
    return True


def make(output: Path, digits: int, seed: int) -> None:
    """Train a model and write its checkpoint, so that ``output`` is whole or not there."""
    print(f"Teaching a tiny Qwen3 {digits}-digit addition, until {TARGET_ACCURACY:.0%} are right ...")
    import torch
    from demo_model.making import shown, whole_directory
    from demo_model.tiny_tokenizer import save_tokenizer
    from demo_model.warm_start import warm_start
    from transformers.utils import logging

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    with shown(TARGET_ACCURACY) as show:
        result = warm_start(digits, seed, TARGET_ACCURACY, show)

    with whole_directory(output) as aside:
        result.model.save_pretrained(aside)
        save_tokenizer(aside)
        record = Record(
            digits=digits, seed=seed, accuracy=result.accuracy, steps=result.steps, seconds=result.seconds
        )
        (aside / RECORD_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    print(f"{output}: {result.accuracy:.0%} right after {result.steps} steps, {result.seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
