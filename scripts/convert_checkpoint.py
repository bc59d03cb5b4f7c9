#!/usr/bin/env python
"""Turns a checkpoint of a run into a Hugging Face directory, whatever parallel layout wrote it.

    python scripts/convert_checkpoint.py runs/addition/checkpoints/step_40 --output models/addition-40

The other direction needs no script: a run starts from any Hugging Face directory (policy.model_name),
and resumes a checkpoint under any layout.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.checkpoint.store import CheckpointError, read_checkpoint
from nemo_like.config.errors import ConfigError
from nemo_like.config.loader import load_config


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path, help="a step_N directory of a run")
    parser.add_argument("--output", type=Path, required=True, help="the directory to make")
    parser.add_argument("--config", type=Path, help="the run's config.yaml; found beside the checkpoints")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. policy.model_name=DIR")
    options = parser.parse_intermixed_args()
    config = options.config or options.checkpoint.resolve().parents[1] / "config.yaml"
    try:
        checkpoint = read_checkpoint(options.checkpoint.resolve())
        cfg = load_config(str(config), options.overrides)
        if options.output.exists():
            raise CheckpointError(f"--output {options.output} exists already; name a new directory")
        # Only now: loading torch takes seconds, and the checks above must be quick.
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        warnings.simplefilter("ignore")  # of libraries about libraries
        from nemo_like.policy.conversion import export_checkpoint

        export_checkpoint(cfg.policy, cfg.loss_fn, checkpoint.policy_path, options.output)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"step {checkpoint.state.step} of {config.parent.name} is in {options.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
