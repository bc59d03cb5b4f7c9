#!/usr/bin/env python
"""Translate a configuration of NeMo-RL or verl, and list what could not be translated.

    python scripts/convert_config.py RL/examples/configs/grpo_math_8B.yaml -o mine.yaml
    python scripts/convert_config.py verl/examples/grpo_trainer/run_qwen3_8b_fsdp.sh data.seed=2 -o mine.yaml
    python scripts/convert_config.py verl/trainer/config/ppo_trainer.yaml data.seed=2 -o mine.yaml

Arguments after the file are key=value of the other framework, as its launcher takes them. The result builds
on configs/grpo_gpu.yaml and holds what differs from it. docs/how_to/moving_over.md says how to read
the tables, which --table prints.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from shlex import quote

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.config.other_frameworks import table_of
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from nemo_like.observability.printable import accept_all_characters
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
    print("\n".join(_report(conversion, framework.name, options.output)), file=sys.stderr)
    return 0


def _report(conversion: Conversion, framework: str, output: Path | None) -> list[str]:
    """Return what became of the configuration, as lines for whoever converts it."""
    lines = [f"{len(conversion.settings)} keys are set by {framework}'s values."]
    for title, problems in (("To know:", conversion.notes), ("Not translated:", conversion.lost)):
        if problems:
            lines += ["", title, *(f"  - {line}" for line in problem_lines(problems))]
    if output is not None:
        lines += ["", *_next(output)]
    return lines


def _next(output: Path) -> list[str]:
    try:
        load_config(output)
    except ConfigError as error:
        return [f"{output} lacks what the configuration did not have:", str(error)]
    return [f"{output} loads. Check it: python run_grpo.py --config {quote(str(output))} --dry-run"]


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "file", type=Path, nargs="?", help="the YAML file of the other framework, or a script that calls verl"
    )
    parser.add_argument("arguments", nargs="*", metavar="key=value", help="arguments of its launcher")
    parser.add_argument(
        "--from", dest="framework", metavar="NAME", help="nemo_rl or verl; else it is guessed"
    )
    parser.add_argument("-o", "--output", type=Path, help="the file to write; else the YAML is printed")
    parser.add_argument("--table", choices=[*CONVERTIBLE, "trl"], help="print the table of a framework")
    options = parser.parse_intermixed_args()
    if options.file is None and options.table is None:
        parser.error("name the file to convert")
    return options


if __name__ == "__main__":
    sys.exit(main())
