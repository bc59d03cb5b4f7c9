"""Synchronous GRPO from one configuration file: compose, validate, set up, run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from nemo_like.config.errors import ConfigError
from nemo_like.config.loader import load_config, to_yaml
from nemo_like.config.machine_rules import Machine
from nemo_like.config.model_info import read_model_info
from nemo_like.config.plan import format_plan, make_plan
from nemo_like.config.validation import validate
from nemo_like.data_plane.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS

_EXAMPLES = """\
examples:
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml grpo.seed=2 policy.data_parallel_size=1
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml loss_fn.reference_policy_kl_penalty=0.01 --dry-run
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml --cfg

arguments follow Hydra's grammar: key=value, ++key=value, ~key (null again); configs/ explains every key
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code: 0 after a whole run, 2 for a configuration that cannot run, else what the run says."""
    options = _parse(arguments)
    try:
        cfg = load_config(options.config, options.overrides)
        if options.cfg:
            print(to_yaml(cfg), end="")
            return 0
        validate(cfg, Machine.another if options.dry_run else Machine.this)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.dry_run:
        model = read_model_info(cfg.policy.model_name, cfg.policy.backend)
        print(format_plan(make_plan(cfg, model, (*ROLLOUT_COLUMNS, *POLICY_COLUMNS))))
        return 0
    # Only now: this loads Ray, and the checks above must be quick.
    from nemo_like.driver.setup import run

    return run(cfg, Path(options.config).stem)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="run_grpo.py",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the YAML file to start from")
    parser.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="validate, print what would run, and stop; this machine's GPUs and disk do not matter",
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
