#!/usr/bin/env python
"""Make the tiny Qwen3 checkpoint of the arithmetic task.

    python scripts/prepare_arithmetic.py --output .cache/models/arithmetic-d2-s1 --digits 2 --seed 1
    python scripts/prepare_arithmetic.py --output .cache/models/arithmetic-moe-d2-s1 --experts 8
    python scripts/prepare_arithmetic.py --output .cache/models/arithmetic-teacher-d2-s1 \\
        --hidden-size 192 --accuracy 0.97

The script teaches a model of 402k parameters addition until it solves about a third of the held-out
problems; GRPO does the rest. That takes some 10 to 20 seconds on one core. With --experts it is a Qwen3-MoE
with that many experts in each layer. The last line makes a teacher of 898k parameters with the same
tokenizer, in about a minute. A checkpoint that is already there is kept.
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
HIDDEN_SIZE = 128


@dataclass(frozen=True, slots=True)
class Kind:
    """Which checkpoint is wanted."""

    digits: int
    seed: int
    experts: int = 0  # in each layer; 0 for a dense model
    hidden_size: int = HIDDEN_SIZE
    target: float = TARGET_ACCURACY  # accuracy at which the training ends

    def __str__(self) -> str:
        experts = f" --experts {self.experts}" if self.experts else ""
        size = f" --hidden-size {self.hidden_size}" if self.hidden_size != HIDDEN_SIZE else ""
        target = f" --accuracy {self.target:g}" if self.target != TARGET_ACCURACY else ""
        return f"--digits {self.digits} --seed {self.seed}{experts}{size}{target}"

    def check(self) -> None:
        """Raise ValueError unless such a checkpoint can be made."""
        if self.experts == 1 or self.experts < 0:
            raise ValueError(f"--experts {self.experts} must be 0 or at least 2; try 8")
        if self.experts and self.hidden_size != HIDDEN_SIZE:
            raise ValueError(f"--hidden-size {self.hidden_size} is of dense models; leave --experts out")
        if self.hidden_size < 64 or self.hidden_size % 64:
            raise ValueError(f"--hidden-size {self.hidden_size} must be a multiple of 64; try 128 or 192")
        if not 0 < self.target < 1:
            raise ValueError(f"--accuracy {self.target:g} must be above 0 and below 1; try 0.3 or 0.97")


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """How a checkpoint was made; the checkpoint holds it as ``warm_start.json``."""

    digits: int
    seed: int
    experts: int = 0  # in each layer; 0 where the model is dense
    hidden_size: int = HIDDEN_SIZE
    target: float = TARGET_ACCURACY
    accuracy: float  # share of held-out problems right when sampled at temperature 1
    steps: int
    seconds: float
    # False in records that lack the field: their models have learnt y+x where x+y is held out.
    holds_out_both_orders: bool = False


def main(arguments: list[str] | None = None) -> int:
    """Make the checkpoint unless it is there. Returns the exit code: 0 when it is there in the end, 1 when it
    cannot be made."""
    from nemo_like.observability.printable import accept_all_characters

    accept_all_characters()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--digits", type=int, default=2, help="digits per operand, 1 to 3 (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of initialisation and data (default 1)")
    parser.add_argument(
        "--experts", type=int, default=0, help="of each layer, at least 2; 0 makes a dense model (default 0)"
    )
    parser.add_argument(
        "--hidden-size", type=int, default=HIDDEN_SIZE, help=f"a multiple of 64 (default {HIDDEN_SIZE})"
    )
    parser.add_argument(
        "--accuracy",
        type=float,
        default=TARGET_ACCURACY,
        help=f"share of held-out problems right at which the training ends (default {TARGET_ACCURACY})",
    )
    options = parser.parse_args(arguments)
    kind = Kind(options.digits, options.seed, options.experts, options.hidden_size, options.accuracy)
    try:
        if is_there(options.output, kind):
            print(f"{options.output} is already there; nothing to do.")
            return 0
        make(options.output, kind)
    except (OSError, RuntimeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def is_there(output: Path, kind: Kind) -> bool:
    """Return whether ``output`` is a complete checkpoint of this kind.

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
    try:
        record = Record(**json.loads((output / RECORD_FILE).read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"{output / RECORD_FILE} is damaged ({error}); remove {output} or choose another --output"
        ) from None
    found = Kind(record.digits, record.seed, record.experts, record.hidden_size, record.target)
    if found != kind:
        raise ValueError(f"{output} was made with {found}, not {kind}; remove it or choose another --output")
    if not record.holds_out_both_orders:
        raise ValueError(
            f"{output} was made by an earlier version, which trained on y+x where x+y is held out; remove it"
        )
    return True


def make(output: Path, kind: Kind) -> None:
    """Train a model and write its checkpoint, so that ``output`` is whole or not there.

    Raises ValueError for a kind that cannot be made.
    """
    kind.check()
    model = f"Qwen3-MoE of {kind.experts} experts a layer" if kind.experts else "Qwen3"
    print(f"Teaching a tiny {model} {kind.digits}-digit addition, until {kind.target:.0%} are right ...")
    import torch
    from transformers.utils import logging

    from scripts.demo_model.making import shown, whole_directory
    from scripts.demo_model.tiny_tokenizer import save_tokenizer
    from scripts.demo_model.warm_start import tiny_config, tiny_mixture_config, warm_start

    torch.set_num_threads(1)
    logging.disable_progress_bar()
    config = tiny_mixture_config(kind.experts) if kind.experts else tiny_config(kind.hidden_size)
    with shown(kind.target) as show:
        result = warm_start(config, kind.digits, kind.seed, kind.target, show)

    with whole_directory(output) as aside:
        result.model.save_pretrained(aside)
        save_tokenizer(aside)
        record = Record(
            digits=kind.digits,
            seed=kind.seed,
            experts=kind.experts,
            hidden_size=kind.hidden_size,
            target=kind.target,
            accuracy=result.accuracy,
            steps=result.steps,
            seconds=result.seconds,
            holds_out_both_orders=True,
        )
        (aside / RECORD_FILE).write_text(json.dumps(asdict(record), indent=2) + "\n", encoding="utf-8")
    print(f"{output}: {result.accuracy:.0%} right after {result.steps} steps, {result.seconds:.0f} s.")


if __name__ == "__main__":
    sys.exit(main())
