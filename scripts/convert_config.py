#!/usr/bin/env python
"""Translate a configuration of NeMo-RL, verl or TRL, list what could not be translated, and check the result.

    python scripts/convert_config.py RL/examples/configs/grpo_math_8B.yaml -o mine.yaml
    python scripts/convert_config.py verl/examples/grpo_trainer/run_qwen3_8b_fsdp.sh data.seed=2 -o mine.yaml
    python scripts/convert_config.py verl/trainer/config/ppo_trainer.yaml data.seed=2 -o mine.yaml
    python scripts/convert_config.py grpo.yaml --num_processes 8 --learning_rate 1e-6 -o mine.yaml

Arguments after the file are those of the other framework, key=value or --key value, as its launcher takes
them. The result builds
on configs/grpo_gpu.yaml and holds what differs from it. docs/how_to/moving_over.md says how to read
the tables, which --table prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from shlex import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.config.other_frameworks import table_of
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from nemo_like.rules.rules import validate
from nemo_like_tools.conversion.pages import table
from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import (
    CONVERTIBLE,
    Conversion,
    convert_configuration,
    framework_of,
    problem_lines,
)
from nemo_like_tools.conversion.writing import conversion_yaml


def main() -> int:
    accept_all_characters()
    options = _parse()
    if options.table is not None:
        print(table(table_of(options.table)))
        return 0
    try:
        theirs, unresolved = read_theirs(options.file, options.arguments)
        framework = framework_of(theirs.tree, options.framework, str(options.file))
        conversion = convert_configuration(framework, theirs, str(options.file))
        conversion.lost[:0] = unresolved
        text = conversion_yaml(conversion, framework.name, options.file.name)
        if options.output is None:
            print(text, end="")
        else:
            options.output.write_text(text, encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"convert_config: {error}", file=sys.stderr)
        return 2
    print(printable("\n".join(_report(conversion, framework.name, options.output))), file=sys.stderr)
    return 0


def _report(conversion: Conversion, framework: str, output: Path | None) -> list[str]:
    """Return what became of the configuration, as lines for whoever converts it."""
    lines = [f"{len(conversion.settings)} keys are set by {framework}'s values."]
    for title, problems in (("To know:", conversion.notes), ("Not translated:", conversion.lost)):
        if problems:
            lines += ["", title, *(f"  - {line}" for line in problem_lines(problems))]
    if output is not None:
        lines += ["", *_checked(output)]
    return lines


def _checked(output: Path) -> list[str]:
    """Return what a dry run of the result finds, as lines. It needs no weights but a model's config.json."""
    command = f"python run_grpo.py --config {quote(str(output))} --dry-run"
    try:
        cfg = load_config(output)
    except ConfigError as error:
        return [f"{output} lacks what the configuration did not have:", str(error)]
    try:
        validate(cfg, Machine.another)
        notes = preflight(cfg, Machine.another, lambda text: None).notes
    except ConfigError as error:
        lines = [f"{output} loads, and a run would be refused; all the rest is checked:", str(error)]
        if any(problem.rule == "is not a directory" for problem in error.problems):
            lines.append("For a plan without weights put the model's config.json alone into that directory.")
        return [*lines, f"Then: {command}"]
    return [f"{output} loads and can be planned: {command}", *(f"  {note}" for note in notes)]


def _own_first(words: Sequence[str]) -> list[str]:
    """Return the words of the command line with this script's options first, and all others after "--"."""
    own: list[str] = []
    others: list[str] = []
    rest = iter(words)
    for word in rest:
        if word in ("-o", "--output", "--from", "--table"):
            own += [word, *islice(rest, 1)]
        elif word.partition("=")[0] in ("-h", "--help", "--output", "--from", "--table"):
            own.append(word)
        else:
            others.append(word)
    return [*own, "--", *others]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file",
        type=Path,
        nargs="?",
        help="the YAML file of the other framework, or a shell script that calls its trainer",
    )
    parser.add_argument(
        "--from", dest="framework", metavar="NAME", help="nemo_rl, verl or trl; else it is guessed"
    )
    parser.add_argument("-o", "--output", type=Path, help="the file to write; else the YAML is printed")
    parser.add_argument("--table", choices=[*CONVERTIBLE], help="print the table of a framework")
    parser.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="arguments of its launcher")
    options = parser.parse_args(_own_first(sys.argv[1:]))
    if options.file is None and options.table is None:
        parser.error("name the file to convert")
    return options


if __name__ == "__main__":
    sys.exit(main())
