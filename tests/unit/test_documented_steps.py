"""Examples name checkpoints that the documented run has when it has ended."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from nemo_like.configuration import load_config
from tests.unit.documented import ROOT, commands

CHECKPOINT = re.compile(r"\bruns/(\w+)(?:/checkpoints/step_(\d+))?(?=\s)")
READS = "python scripts/"


def examples() -> list[str]:
    """Return the commands of the documentation and of the scripts' own help that call scripts."""
    helps = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "scripts").glob("*.py")))
    joined = re.sub(r"\\+\n\s*", "", helps)
    of_scripts = [line.strip() for line in joined.splitlines() if line.strip().startswith(READS)]
    return [*(one.line for one in commands() if one.line.startswith(READS)), *of_scripts]


def documented_run(name: str) -> tuple[Path, list[str]]:
    """Return the configuration and the arguments of the command that makes a run of this name."""
    made = {one.line for one in commands() if one.line.endswith(f" logger.run_name={name}")}
    (line,) = made
    _, _, _, config, *arguments = shlex.split(line)
    return Path(config), arguments


def test_a_step_that_an_example_reads_is_the_last_of_its_run_which_alone_is_kept_for_certain() -> None:
    named = [
        (name, int(step)) for line in examples() for name, step in CHECKPOINT.findall(f"{line} ") if step
    ]
    assert len(named) >= 3
    for name, step in named:
        config, arguments = documented_run(name)
        cfg = load_config(ROOT / config, arguments)
        assert cfg.checkpointing.enabled
        assert step == cfg.grpo.max_num_steps


def test_an_evaluation_of_a_documented_run_is_given_the_configuration_of_that_run() -> None:
    found = 0
    for line in examples():
        if (
            line.startswith(f"{READS}evaluate.py")
            and (run := CHECKPOINT.search(f"{line} "))
            and run[1] != "X"
        ):
            found += 1
            assert f"--config {documented_run(run[1])[0]} " in line
    assert found >= 3
