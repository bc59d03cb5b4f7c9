#!/usr/bin/env python
"""Convert a checkpoint of a run, whatever parallel layout wrote it, to a Hugging Face directory.

    python scripts/convert_checkpoint.py runs/addition --output models/addition
    python scripts/convert_checkpoint.py runs/addition/checkpoints/step_80 --output models/addition-80

The other direction needs no script: a run starts from a Hugging Face directory (policy.model_name), and can
resume a checkpoint under another layout.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.checkpoint.store import (
    POLICY_GROUP,
    Checkpoint,
    CheckpointError,
    checkpoint_paths,
    read_checkpoint,
    verify_group_files,
)
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.data.chat_template import set_chat_template
from nemo_like.models.model_info import read_model_info
from nemo_like.observability.disk import DiskFull, whole_directory
from nemo_like.observability.printable import accept_all_characters
from nemo_like.plan.plan import weight_bytes

CONFIG_FILE = "config.yaml"


def main() -> int:
    accept_all_characters()
    options = parse()
    source = options.source.resolve()
    is_run = (source / CONFIG_FILE).is_file()
    try:
        check_is_there(options.source)
        config = options.config or (source if is_run else run_of(options.source)) / CONFIG_FILE
        cfg = load_config(str(config), options.overrides)
        checkpoint = read_checkpoint(latest(source, cfg) if is_run else source)
        verify_group_files(checkpoint)
        if options.output.exists():
            raise CheckpointError(f"--output {options.output} exists already; name a new directory")
        convert(cfg, checkpoint, options.output)
    except (CheckpointError, ConfigError, DiskFull, OSError) as error:
        print(f"convert_checkpoint: {error}", file=sys.stderr)
        return 2
    print(f"step {checkpoint.state.step} of {config.parent.name} is in {options.output}")
    return 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, help="a run directory, for its latest step, or a step_N")
    parser.add_argument("--output", type=Path, required=True, help="the directory to make")
    parser.add_argument("--config", type=Path, help="the run's config.yaml; found beside the checkpoints")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. policy.model_name=DIR")
    return parser.parse_intermixed_args()


def check_is_there(source: Path) -> None:
    """Raise CheckpointError, which names the steps that there are, when ``source`` is no directory."""
    if not source.is_dir():
        above = source.resolve().parent
        there = ", ".join(path.name for path in checkpoint_paths(above))
        has = f"{above} has {there}" if there else "name a run directory, or a step_N in its checkpoints"
        raise CheckpointError(f"{source} is no directory; {has}")


def run_of(step: Path) -> Path:
    """Return the run directory above the checkpoint ``step``. Raises CheckpointError when there is none."""
    above = step.resolve().parent
    if not (above.parent / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"{step} is neither a run directory ({CONFIG_FILE}) nor a step_N in the checkpoints of one; "
            f"--config names the {CONFIG_FILE} of a run whose checkpoints are elsewhere"
        )
    return above.parent


def latest(run_directory: Path, cfg: Config) -> Path:
    """Return the path of the run's newest checkpoint, which may be broken. Raises CheckpointError when there
    is none."""
    elsewhere = cfg.checkpointing.checkpoint_dir
    root = run_directory / "checkpoints" if elsewhere is None else Path(elsewhere)
    paths = checkpoint_paths(root)
    if not paths:
        raise CheckpointError(f"there is no checkpoint (step_N) in {root}")
    return paths[-1]


def convert(cfg: Config, checkpoint: Checkpoint, output: Path) -> None:
    """Write ``output`` from ``checkpoint``, with the run's chat template, if it has one: all or nothing."""
    template = None
    if cfg.data.chat_template is not None:
        template = Path(cfg.data.chat_template).read_text(encoding="utf-8")
    num_bytes = weight_bytes(cfg, read_model_info(cfg.policy.model_name, cfg.policy.backend))
    # Only now: loading torch takes seconds, and the checks above must be quick.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    warnings.simplefilter("ignore")  # they are libraries' warnings about other libraries
    from nemo_like.policy.backends.checkpoint_conversion import export_checkpoint

    with whole_directory(output, "the converted model", num_bytes) as aside:
        export_checkpoint(cfg.policy, cfg.loss_fn, checkpoint.path_of(POLICY_GROUP), aside)
        if template is not None:
            set_chat_template(aside, template)


if __name__ == "__main__":
    sys.exit(main())
