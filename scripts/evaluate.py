"""Evaluate a checkpoint, or a server's model, on the held-out problems of a configuration
(docs/how_to/evaluate.md).

python scripts/evaluate.py --config configs/X.yaml --checkpoint runs/X
python scripts/evaluate.py --config configs/X.yaml --checkpoint models/Qwen3-8B grpo.max_val_samples=1000 \\
    grpo.num_val_generations_per_prompt=16
python scripts/evaluate.py --config configs/X.yaml --endpoint http://host:8000/v1 --model NAME

The answers are sampled and judged as in a validation: after the run's last step, a validation and this
command give the same numbers. It makes a run directory with all answers and their report, and ends with a
table of pass@k, mean@k and their confidence intervals.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.api.evaluated_checkpoint import EvaluatedCheckpoint, evaluated_checkpoint
from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.loader import to_yaml
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.driver import exit_codes
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.stopping import ignore_first_interrupt, sigterm_as_interrupt
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.plan.evaluation_plan import as_evaluation, format_evaluation_plan
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.downloads import with_downloaded, with_downloads
from nemo_like.rules.rules import validate


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate as ``arguments`` say; return the exit code, as docs/reference/exit_codes.md lists them."""
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
    machine = Machine.another if options.dry_run else Machine.this
    try:
        checkpoint = None if options.checkpoint is None else evaluated_checkpoint(options.checkpoint)
        if checkpoint is not None and checkpoint.source is not None and not options.dry_run:
            _convert(checkpoint)
        cfg = as_evaluation(load_config(options.config, _overrides(options, checkpoint)), options.sets)
        if options.cfg:
            print(to_yaml(cfg), end="")
            return exit_codes.FINISHED
        cfg = with_downloaded(cfg) if options.dry_run else with_downloads(cfg)
        validate(cfg, machine)
        checked = preflight(cfg, machine, partial(print, file=sys.stderr))
    except KeyboardInterrupt:
        print("interrupted before anything started", file=sys.stderr)
        return exit_codes.INTERRUPTED
    except (ConfigError, ValueError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.REFUSED
    assert cfg.evaluation is not None
    if options.dry_run:
        print(format_evaluation_plan(cfg, cfg.evaluation), "", *checked.notes, sep="\n")
        return exit_codes.FINISHED
    return _run(cfg, f"evaluate-{options.config.stem}")


def _run(cfg: Config, name: str) -> int:
    # Only now: this loads Ray, and the checks above must be quick.
    from nemo_like.driver.whole_run import run_directory, run_in
    from nemo_like_tools.report.report_recorder import ReportRecorder

    try:
        return run_in(run_directory(cfg, name), cfg, report=ReportRecorder).exit_code
    except RunFailed as error:
        print(printable(str(error)), file=sys.stderr)
        return exit_codes.FAILED


def _overrides(options: argparse.Namespace, checkpoint: EvaluatedCheckpoint | None) -> list[str]:
    """Return the arguments for the configuration; those of the command line come last."""
    overrides = ["+evaluation=default"]
    if checkpoint is not None:
        if (checkpoint.model / "config.json").is_file():
            overrides.append(f"policy.model_name='{checkpoint.model.absolute()}'")
        elif checkpoint.source is None:
            overrides.append(f"policy.model_name='{checkpoint.model}'")
        # What still has to be converted has the shape of what it was trained from.
        overrides.append(f"evaluation.step={checkpoint.step}")
    if options.endpoint is not None:
        overrides += [f"evaluation.base_url='{options.endpoint}'", f"evaluation.model='{options.model}'"]
    if options.step is not None:
        overrides.append(f"evaluation.step={options.step}")
    return [*overrides, *options.overrides]


def _convert(checkpoint: EvaluatedCheckpoint) -> None:
    """Convert a run's checkpoint to a Hugging Face directory beside it. Raises ValueError when it cannot."""
    print(f"converting {checkpoint.source} to {checkpoint.model}", file=sys.stderr)
    program = Path(__file__).resolve().with_name("convert_checkpoint.py")
    command = [sys.executable, str(program), str(checkpoint.source), "--output", str(checkpoint.model)]
    config = checkpoint.model.parent / "config.yaml"
    ended = subprocess.run([*command, "--config", str(config)], check=False, stdout=subprocess.DEVNULL)
    if ended.returncode:
        raise ValueError(f"--checkpoint: {checkpoint.source} could not be converted; the reason is above")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="a training configuration")
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="PATH",
        help="a run directory, a run's checkpoints/step_N, or a Hugging Face checkpoint; without it "
        "policy.model_name is evaluated",
    )
    parser.add_argument("--endpoint", metavar="URL", help="an OpenAI-compatible API that answers instead")
    parser.add_argument("--model", metavar="NAME", help="the name under which the server has its model")
    parser.add_argument("--step", type=int, help="sample with the seeds of a validation after this step")
    parser.add_argument("--sets", nargs="+", default=[], metavar="NAME", help="these of data.validation only")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--cfg", action="store_true", help="print the resolved configuration and stop")
    mode.add_argument("--dry-run", action="store_true", help="validate, print what would run, and stop")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="values that replace the file's")
    options = parser.parse_intermixed_args(arguments)
    if (options.endpoint is None) != (options.model is None):
        parser.error("--endpoint URL and --model NAME go together")
    return options


if __name__ == "__main__":
    exit_code = main()
    ignore_first_interrupt()
    sys.exit(exit_code)
