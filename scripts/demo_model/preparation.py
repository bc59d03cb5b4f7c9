"""The command line of scripts that make the data and the model of a demo. Standard library only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from nemo_like.observability.printable import accept_all_characters


def prepare(
    description: str | None,
    data_help: str,
    make_data: Callable[[Path], None],
    make_model: Callable[[Path, int], None],
    arguments: Sequence[str] | None,
) -> int:
    """Make what ``--output`` and ``--data`` name, unless it is there. ``make_model`` gets the seed too.

    Return the exit code: 0 when all is there in the end, 1 otherwise.
    """
    accept_all_characters()
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="checkpoint directory to make")
    parser.add_argument("--data", type=Path, required=True, help=data_help)
    parser.add_argument("--seed", type=int, default=1, help="of the model and its warm start (default 1)")
    options = parser.parse_args(arguments)
    try:
        if not (options.data / "validation.jsonl").is_file():
            make_data(options.data)
        if not (options.output / "model.safetensors").is_file():
            make_model(options.output, options.seed)
    except (OSError, RuntimeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
