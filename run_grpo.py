"""Run GRPO or PPO from one configuration file: compose and validate it, set up the processes, train."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

if find_spec("hydra") is None:
    # This Python lacks the project's packages: go on with that of .venv, which nobody has to activate.
    environment = Path(__file__).absolute().parent / ".venv"
    python = environment / "bin" / "python"
    if not python.is_file() or Path(sys.prefix).resolve() == environment.resolve():
        sys.exit(
            f"{sys.executable} lacks this project's packages, and so does {environment}. `make demo` and "
            "`bash scripts/setup.sh` put them there; on a GPU machine: bash scripts/setup.sh --gpu"
        )
    os.execv(python, [str(python), *sys.argv])

from nemo_like.batch.columns import bytes_per_token
from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.loader import Sweep, to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.config.search_path import find_configuration
from nemo_like.config.secrets import masked
from nemo_like.configuration import Config, load_config, load_sweep
from nemo_like.driver import exit_codes
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stopping import ignore_first_interrupt, sigterm_as_interrupt
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.run_lock import DirectoryInUse
from nemo_like.plan.machine_rules import Machine
from nemo_like.plan.plan import format_plan, make_plan
from nemo_like.plan.run_models import run_models
from nemo_like.preflight.checks import Preflight, preflight
from nemo_like.preflight.downloads import with_downloaded, with_downloads
from nemo_like.preflight.epochs import with_counted_epochs
from nemo_like.rules.rules import validate

_EXAMPLES = """\
examples:
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml grpo.seed=2 policy.data_parallel_size=1
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml loss_fn.reference_policy_kl_penalty=0.01 --dry-run
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml policy=fsdp --cfg
  run_grpo.py --config configs/grpo_arithmetic_cpu.yaml --multirun policy.optimizer.lr=3e-4,1e-3 grpo.seed=1,2

arguments follow Hydra's grammar: key=value, ++key=value, ~key (null again), group=name; configs/ explains
every key, docs/reference/configuration.md the rest
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` (by default those of the process) ask for, and return the exit code.

    docs/reference/exit_codes.md lists the exit codes.
    """
    accept_all_characters()
    bypass_proxies()
    options = _parse(arguments)
    try:
        with sigterm_as_interrupt():
            return _main(options)
    except KeyboardInterrupt:
        print("interrupted before all results were written", file=sys.stderr)
        return exit_codes.INTERRUPTED


def _main(options: argparse.Namespace) -> int:
    try:
        config, overrides = _configuration(options)
        if options.multirun:
            sweep = load_sweep(config, overrides)
            return _plan_sweep(config, sweep) if options.dry_run else _sweep(config, sweep)
        if options.cfg:
            print(to_yaml(load_config(config, overrides)), end="")
            return 0
        if options.what_if is not None:
            cfg = load_config(config, overrides)
            validate(cfg, Machine.another)
            return _what_if(cfg, options)
        if options.dry_run:
            print(_plan(config, overrides))
            return exit_codes.FINISHED
        counted = with_counted_epochs(
            lambda more: with_downloads(load_config(config, [*overrides, *more])), Machine.this
        )
        cfg = counted.cfg
        for note in counted.notes:
            print(printable(note.text), file=sys.stderr)
        _check(cfg, Machine.this)
    except KeyboardInterrupt:
        print("interrupted before anything started", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except ConfigError as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED
    # Only now: this loads Ray, and the checks above must be quick.
    from nemo_like.driver.whole_run import run_directory, run_in
    from nemo_like_tools.report.report_recorder import ReportRecorder

    try:
        return run_in(run_directory(cfg, config.stem), cfg, report=ReportRecorder).exit_code
    except (DirectoryInUse, RunFailed) as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED if isinstance(error, DirectoryInUse) else exit_codes.FAILED


def _configuration(options: argparse.Namespace) -> tuple[Path, list[str]]:
    """Return the configuration file, and the arguments to apply to it."""
    if options.config is not None:
        return Path(options.config), options.overrides
    file = find_configuration(options.config_name, options.config_dir)
    if options.config_dir is None or file.parent == Path(options.config_dir):
        return file, options.overrides
    return file, [f"hydra.searchpath=['{Path(options.config_dir).absolute()}']", *options.overrides]


def _check(cfg: Config, machine: Machine) -> Preflight:
    """Check a configuration, and note environments with replaced options on stderr. Raises ConfigError."""
    validate(cfg, machine)
    return preflight(cfg, machine, partial(print, file=sys.stderr))


def _plan(config: Path, arguments: Sequence[str]) -> str:
    """Return the plan of a run as text, whatever this machine can run. Raises ConfigError."""
    cfg, notes = with_counted_epochs(
        lambda more: with_downloaded(load_config(config, [*arguments, *more])), Machine.another
    )
    checked = _check(cfg, Machine.another)
    plan = make_plan(cfg, run_models(cfg), bytes_per_token(checked.columns))
    return "\n".join([format_plan(plan), "", *(printable(str(note)) for note in (*notes, *checked.notes))])


def _what_if(cfg: Config, options: argparse.Namespace) -> int:
    """Print what a recorded run would do under this configuration; return the exit code."""
    from nemo_like_tools.what_if.calibration import UnfitRun
    from nemo_like_tools.what_if.prediction import format_what_if, what_if

    try:
        found = what_if(cfg, Path(options.what_if))
    except UnfitRun as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED
    print(json.dumps(found.as_json(), indent=2) if options.json else format_what_if(found))
    return 0


def _sweep(config: Path, sweep: Sweep) -> int:
    """Run the jobs of a sweep; return the exit code."""
    from nemo_like.sweep.multirun import run_sweep
    from nemo_like_tools.report.run_page import write_comparison

    return run_sweep(Path(__file__).absolute(), config, sweep, write_comparison)


def _plan_sweep(config: Path, sweep: Sweep) -> int:
    """Check every job of a sweep, and print the plan of each valid one; return the exit code."""
    if sweep.jobs_are_examples:
        print("the sweeper chooses values as it goes; these jobs have each value and end of an interval\n")
    refused = []
    for number, arguments in enumerate(sweep.jobs):
        job = printable(f"job {number}: {' '.join(map(masked, arguments))}")
        try:
            plan = _plan(config, arguments)
        except ConfigError as error:
            print(job, printable(str(error)), sep="\n", file=sys.stderr)
            refused.append(number)
        else:
            print(job, "", plan, "", sep="\n")
    if refused:
        numbers = ", ".join(map(str, refused))
        print(f"{len(refused)} of {len(sweep.jobs)} jobs cannot run: {numbers}", file=sys.stderr)
    return exit_codes.REFUSED if refused else exit_codes.FINISHED


class _Parser(argparse.ArgumentParser):
    """A parser whose errors say how this command takes a file and keys."""

    def error(self, message: str) -> NoReturn:
        super().error(f"{message}; write run_grpo.py --config FILE key=value, keys without dashes")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="run_grpo.py",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--config", metavar="FILE", help="the YAML file to start from")
    start.add_argument("--config-name", metavar="NAME", help="a shipped one, or one of --config-dir, instead")
    parser.add_argument("--config-dir", metavar="DIR", help="a folder to look in before the shipped ones")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    mode.add_argument(
        "--dry-run",
        action="store_true",
        help="validate, print what would run, and stop; this machine's GPUs and disk do not matter",
    )
    mode.add_argument(
        "--what-if",
        metavar="RUN_DIR",
        help="predict steps of this configuration, and of others, from what a run recorded "
        "(docs/how_to/what_if.md)",
    )
    parser.add_argument(
        "-m",
        "--multirun",
        action="store_true",
        help="a run for each combination of key=value1,value2; with --dry-run the plan of each",
    )
    parser.add_argument("--json", action="store_true", help="with --what-if: print JSON")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if options.json and options.what_if is None:
        parser.error("--json goes with --what-if")
    if options.multirun and (options.cfg or options.what_if is not None):
        parser.error("of the modes, only --dry-run goes with --multirun")
    if options.config is not None and options.config_dir is not None:
        parser.error("--config-dir goes with --config-name; --config is the path of a file")
    return options


if __name__ == "__main__":
    exit_code = main()
    ignore_first_interrupt()
    sys.exit(exit_code)
