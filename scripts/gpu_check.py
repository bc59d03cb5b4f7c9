#!/usr/bin/env python
"""Check everything that needs a GPU on the GPUs that are here, and measure it. One GPU is enough.

    python scripts/gpu_check.py [--output DIR] [--parts found,kernels,...] [--dry-run]

Each part has processes of its own with deadlines, so that one that crashes or hangs neither stops the others
nor keeps memory. None takes more than eight minutes: where a command may take no longer, call the parts one
by one. Needs no network, and this project need not be installed. Prints a report; DIR gets it too, as text
and as JSON after every process, with its output; one that was cut off counts with what it had measured. Ends
with code 1 when anything is off: docs/how_to/gpu_check.md says what is judged, and by which limits. The parts
kernels, engines and drafts run tests, which need pytest: bash scripts/setup.sh --dev.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import signal
import sys
import time
import traceback
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.cluster.c_compiler import REMEDY, compiling_problem
from scripts.gpu_check_parts.commands import (
    PART_LIMIT_S,
    PARTS,
    Command,
    Part,
    log_path,
    model_directory,
)
from scripts.gpu_check_parts.conclusions import Finished, all_reasons, conclude, part_lines, summary_lines
from scripts.gpu_check_parts.execution import Done, run
from scripts.gpu_check_parts.found import OPTIONAL, is_there, versions
from scripts.gpu_check_parts.judgement import judge_end
from scripts.gpu_check_parts.sampling import MemorySampler, ReadMemory, open_nvml
from scripts.gpu_check_parts.settings import GIB, ROOT, Result, Settings

_SIZES = {"cuda": ("1.7B", "0.6B"), "cpu": ("tiny",)}
# With less than this left of a part's time a command is not begun.
_WORTH_BEGINNING_S = 10.0
# The driver takes a moment to give a process's memory back after its end.
_MEMORY_BACK_S = 10.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the check; return 0 when nothing is off, else 1."""
    options = _parse(arguments)
    gpus, read = open_nvml()
    settings = Settings(
        device=options.device,
        output=options.output.absolute(),
        gpus=gpus if options.device == "cuda" else (),
        demo_steps=options.demo_steps,
        mark=uuid.uuid4().hex[:8],
    )
    parts = [part for part in PARTS if part.name in options.parts and (settings.on_gpu or not part.needs_gpu)]
    print("\n".join(_heading(settings)))
    if options.dry_run:
        print("\n".join(_plan(settings, parts)))
        return 0
    settings.output.mkdir(parents=True, exist_ok=True)
    before = _used(read)
    results: dict[str, Result] = {}
    with _interrupted_by_sigterm():
        _run_parts(parts, settings, read, results)
    results["end"] = Result(reasons=_end(before, read))
    _write_report(settings, results)
    print("\n".join(summary_lines(settings.output, results)))
    return 1 if all_reasons(results) else 0


@contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """Have what ends this process from outside end what it started too, and leave a report."""
    previous = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _run_parts(
    parts: Sequence[Part], settings: Settings, read: ReadMemory | None, results: dict[str, Result]
) -> None:
    """Run one part after the other, until all have run or an interrupt; the report is written meanwhile."""
    for part in parts:
        print(f"\n{part.name}: {part.what} (about {part.budget_s} s)", flush=True)
        result = results[part.name] = Result()
        is_interrupted = False
        try:
            for _ in _run_part(part, settings, read if settings.on_gpu else None, result):
                _write_report(settings, results)
        except KeyboardInterrupt:
            is_interrupted = True
            result.reasons.append("the check was interrupted: nothing after this ran")
        except Exception:  # whatever a part leaves that cannot be read, the others are still to run
            result.reasons.append(f"what it left cannot be read:\n{traceback.format_exc()}")
        print("\n".join(part_lines(part.name, result)), flush=True)
        _write_report(settings, results)
        if is_interrupted:
            break


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=ROOT / "runs" / "gpu_check", metavar="DIR")
    parser.add_argument("--parts", default=",".join(names), help=f"some of {','.join(names)}")
    parser.add_argument("--dry-run", action="store_true", help="say what would run, and what is missing here")
    parser.add_argument(
        "--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the check itself"
    )
    parser.add_argument(
        "--demo-steps", type=int, help="fewer than the demo's own; accuracy is not judged then"
    )
    options = parser.parse_args(arguments)
    options.parts = options.parts.split(",")
    if unknown := [name for name in options.parts if name not in names]:
        parser.error(f"--parts: there is no {', '.join(unknown)}; there are {', '.join(names)}")
    return options


def _heading(settings: Settings) -> list[str]:
    lines = [f"Python {platform.python_version()} on {platform.machine()}, {sys.executable}"]
    for module, version in versions().items():
        lines.append(f"  {module:<20}{version or ('there' if is_there(module) else 'missing')}")
    for index, gpu in enumerate(settings.gpus):
        free = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
        lines.append(f"  GPU {index}               {gpu.name}, {free}")
    if settings.on_gpu and not settings.gpus:
        lines.append("  GPUs                none that the package nvidia-ml-py finds")
    return lines


def _plan(settings: Settings, parts: Sequence[Part]) -> list[str]:
    lines = []
    for part in parts:
        lines += ["", f"{part.name}: {part.what} (about {part.budget_s} s)"]
        lines += [f"  cannot run here: {reason}" for reason in _lacks(settings, part)]
        for command in part.commands(settings, _SIZES[settings.device][0]):
            within_s = min(command.deadline_s, PART_LIMIT_S)
            lines.append(f"  within {within_s:.0f} s: {' '.join(command.words)}")
    total = f"about {sum(part.budget_s for part in parts)} s in all, on one H100 or H200"
    return [*lines, "", f"{total}; no part may take more than eight minutes"]


def _lacks(settings: Settings, part: Part) -> list[str]:
    """Return why the part cannot run here."""
    missing = [_said_of_missing(module) for module in _missing(part.needs)]
    if settings.on_gpu and part.name != "found" and not _sees_gpus(settings):
        missing.append("there is no NVIDIA GPU")
    return missing


def _sees_gpus(settings: Settings) -> bool:
    return bool(settings.gpus) or any(Path("/dev").glob("nvidia[0-9]*"))


def _run_part(part: Part, settings: Settings, read: ReadMemory | None, result: Result) -> Iterator[Command]:
    """Run the part's commands, add to its result what they say, and yield each that has ended.

    Raises KeyboardInterrupt when one was interrupted, after its end.
    """
    if part.name == "found":
        _look(settings, result)
    if lacks := _lacks(settings, part):
        result.reasons.append(f"did not run: {', '.join(lacks)}")
        return
    size = _SIZES[settings.device][0]
    if part.has_size:
        from scripts.gpu_check_parts.run_report import fitting_size

        fitting = fitting_size(settings, _SIZES[settings.device])
        if fitting is None:
            result.reasons.append(f"did not run: no GPU has room for a {_SIZES[settings.device][-1]} model")
            return
        size = fitting
    try:
        for command in part.commands(settings, size):
            done = _run_command(command, settings, read, result)
            yield command
            if done is None or (command.is_needed and done.returncode != 0):
                break
            if done.is_interrupted:
                raise KeyboardInterrupt
    finally:
        shutil.rmtree(model_directory(settings), ignore_errors=True)


def _look(settings: Settings, result: Result) -> None:
    """Add to the result what there is to be seen without any other process."""
    result.figures = {"versions": versions(), "gpus": [asdict(gpu) for gpu in settings.gpus]}
    result.notes += [f"{module} is missing, which is not needed" for module in _missing(OPTIONAL)]
    required = {module for each in PARTS for module in each.needs}
    result.reasons += map(_said_of_missing, _missing(sorted(required)))
    if settings.on_gpu and (problem := compiling_problem()):
        result.reasons.append(f"{problem}; {REMEDY}")
    if settings.on_gpu and not settings.gpus:
        result.reasons.append("nvidia-ml-py finds no GPU, so memory is not measured")


def _run_command(
    command: Command, settings: Settings, read: ReadMemory | None, result: Result
) -> Done | None:
    """Run one command within what is left of its part's time, and add what it says; None where too little
    is left."""
    left_s = PART_LIMIT_S - result.seconds
    if left_s < _WORTH_BEGINNING_S:
        result.reasons.append(f"{command.what} did not run: the part's {PART_LIMIT_S} s were over")
        return None
    before = _used(read)
    with MemorySampler(read if command.run_name else None) as sampler:
        done = run(
            command.words,
            deadline_s=min(command.deadline_s, left_s),
            log=log_path(settings, command),
            mark=settings.mark,
        )
    result.seconds += done.seconds
    finished = Finished(command=command, done=done, samples=sampler.samples, before=before)
    conclude(settings, finished, result)
    return done


def _said_of_missing(module: str) -> str:
    is_of_tests = module.startswith("pytest")
    return f"{module} is missing" + (" (bash scripts/setup.sh --dev installs it)" if is_of_tests else "")


def _missing(modules: Sequence[str]) -> list[str]:
    return [module for module in modules if not is_there(module)]


def _used(read: ReadMemory | None) -> tuple[int, ...]:
    return () if read is None else tuple(gpu.used_bytes for gpu in read())


def _end(before: Sequence[int], read: ReadMemory | None) -> list[str]:
    """Return what is off about the GPUs' memory once all processes have ended."""
    deadline = time.monotonic() + _MEMORY_BACK_S
    while (reasons := judge_end(before, _used(read))) and time.monotonic() < deadline:
        time.sleep(0.5)
    return reasons


def _write_report(settings: Settings, results: dict[str, Result]) -> None:
    lines = [line for name, result in results.items() for line in part_lines(name, result)]
    lines = [*_heading(settings), *lines, *summary_lines(settings.output, results)]
    (settings.output / "report.txt").write_text("\n".join(lines) + "\n")
    content = {
        "time": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "device": settings.device,
        "reasons": all_reasons(results),
        "parts": {name: asdict(result) for name, result in results.items()},
    }
    # Not-a-number becomes null.
    plain = json.loads(json.dumps(content, default=str), parse_constant=lambda _: None)
    (settings.output / "report.json").write_text(json.dumps(plain, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main())
