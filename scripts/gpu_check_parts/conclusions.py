"""What each command says, once it has ended: figures, tables and reasons, added to its part's result."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from scripts.gpu_check_parts.commands import Command, Prints, outcomes_path
from scripts.gpu_check_parts.execution import Done
from scripts.gpu_check_parts.found import PACKAGES, cuda_facts, import_problems, is_there
from scripts.gpu_check_parts.judgement import (
    judge_accuracy,
    judge_memory,
    judge_steps,
    judge_tests,
)
from scripts.gpu_check_parts.outcomes import read_outcomes
from scripts.gpu_check_parts.sampling import MemorySample
from scripts.gpu_check_parts.settings import Result, Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A command that has ended, and the memory of the GPUs meanwhile."""

    command: Command
    done: Done
    samples: Sequence[MemorySample]
    before: Sequence[int]  # bytes that each GPU held before it


def conclude(settings: Settings, finished: Finished, result: Result) -> None:
    """Add what this command says to its part's result, also where it was ended before it had said all."""
    command = finished.command
    result.reasons += finished.done.reasons(command.what)
    if command.run_name is not None:
        _run(settings, finished, result)
    match command.prints:
        case Prints.imports:
            _found(finished, result)
        case Prints.rates:
            _rates(finished, result)
        case Prints.costs:
            _costs(finished, result)
        case Prints.outcomes:
            _tests(settings, command, result)
        case Prints.nothing:
            pass


def _found(finished: Finished, result: Result) -> None:
    lines = finished.done.log.read_text(encoding="utf-8", errors="replace").splitlines()
    problems = import_problems(lines, [module for module in PACKAGES if is_there(module)])
    result.reasons += [f"{module} cannot be imported: {error}" for module, error in problems.items()]
    result.figures = {**result.figures, "cuda": cuda_facts(lines)}


def _tests(settings: Settings, command: Command, result: Result) -> None:
    counts = read_outcomes(outcomes_path(settings, command.what))
    result.reasons += judge_tests(counts)
    result.figures = {**result.figures, "tests": asdict(counts)}
    result.table.append(
        f"{counts.passed} tests passed, {len(counts.failed)} failed, {len(counts.skipped)} were skipped"
    )
    result.table += [f"  skipped: {name}: {reason}" for name, reason in counts.skipped.items()]
    for name, measured in counts.measured.items():
        result.table += [f"  {name}", *figure_lines(measured, indent=4)]


def _costs(finished: Finished, result: Result) -> None:
    """Take in every line in which a figure's name has figures, or the error that came in their place."""
    found: dict[str, Any] = {}
    for line in finished.done.log.read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("{") and line.endswith("}"):
            found |= json.loads(line)
    what = finished.command.what
    if not found and not finished.done.returncode:
        result.reasons.append(f"{what} printed no figures ({finished.done.log})")
    result.figures = {**result.figures, what: found}
    for name, figures in found.items():
        if "error" in figures:
            result.reasons.append(f"{name}: {str(figures['error']).strip().splitlines()[-1]}")
        else:
            result.table += [name, *figure_lines(figures)]


def figure_lines(figures: Mapping[str, Any], indent: int = 2) -> list[str]:
    """Return lines that show figures: plain ones in one, and each group of them in one of its own."""
    plain = {key: value for key, value in figures.items() if not isinstance(value, Mapping)}
    groups = {key: value for key, value in figures.items() if isinstance(value, Mapping)}
    shown = ", ".join(f"{key} {_shown(value)}" for key, value in plain.items())
    lines = [" " * indent + shown] if shown else []
    for key, group in groups.items():
        below = figure_lines(group, indent + 2)
        lines += [f"{' ' * indent}{key}: {below[0].strip()}", *below[1:]] if below else []
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return " / ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _rates(finished: Finished, result: Result) -> None:
    text = finished.done.log.read_text(encoding="utf-8", errors="replace")
    try:
        measured = json.loads(text[text.index("{") :])
    except ValueError:
        if not finished.done.returncode:
            result.reasons.append(f"transports printed no figures ({finished.done.log})")
        return
    result.figures = {**result.figures, "transports": measured}
    rates = {name: rate for name, rate in measured.items() if name.endswith("_gb_per_s")}
    size = f"{measured['num_bytes'] / 1e9:.2f} GB"
    result.table += [
        f"{name.removesuffix('_gb_per_s')}: {size} at {rate} GB/s" for name, rate in rates.items()
    ]


def _run(settings: Settings, finished: Finished, result: Result) -> None:
    """Read and judge a whole run. What reads its configuration is imported here: it needs Hydra."""
    from scripts.gpu_check_parts.figures import mismatch_figures
    from scripts.gpu_check_parts.memory import peak_table
    from scripts.gpu_check_parts.run_files import read_run
    from scripts.gpu_check_parts.run_report import measured_run, stage_table

    command = finished.command
    assert command.run_name is not None
    run_dir = settings.runs / command.run_name
    files = read_run(run_dir)
    mismatch = mismatch_figures(files.steps)
    result.reasons += [
        f"{command.what}: {reason}" for reason in judge_steps(files.steps, command.num_steps, mismatch)
    ]
    figures: dict[str, Any] = {
        "run_dir": str(run_dir),
        "seconds": finished.done.seconds,
        "mismatch": mismatch,
    }
    if command.what == "demo":
        accuracies = [one["validation/accuracy"] for one in files.records if "validation/accuracy" in one]
        figures["accuracies"] = accuracies
        if settings.demo_steps is None:
            result.reasons += judge_accuracy(accuracies)
    if files.steps and (run_dir / "config.yaml").is_file():
        measured = measured_run(settings, run_dir, files, finished.samples, finished.before)
        figures |= measured.figures
        result.reasons += [f"{command.what}: {reason}" for reason in judge_memory(measured.peaks)]
        result.table += [*stage_table(command.what, figures), *peak_table(measured.peaks)]
    result.figures = {**result.figures, command.what: figures}


def part_lines(name: str, result: Result) -> list[str]:
    """Return what to show of a part."""
    state = "off" if result.reasons else "ok"
    lines = ["", f"== {name}: {state}, {result.seconds:.0f} s", *result.table, *result.notes]
    return [*lines, *(f"! {reason}" for reason in result.reasons)]


def summary_lines(path: Path, results: Mapping[str, Result]) -> list[str]:
    """Return the end of the report on these parts."""
    total, reasons = sum(result.seconds for result in results.values()), all_reasons(results)
    lines = ["", f"{total:.0f} s in all; everything is in {path}"]
    lines.append(f"{len(reasons)} things are off:" if reasons else "nothing is off")
    return [*lines, *(f"  - {reason.splitlines()[0]}" for reason in reasons)]


def all_reasons(results: Mapping[str, Result]) -> list[str]:
    """Return everything that is off, with the name of its part."""
    return [f"{name}: {reason}" for name, result in results.items() for reason in result.reasons]
