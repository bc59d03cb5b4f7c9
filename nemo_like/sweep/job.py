"""Runs one job of a sweep in a process of its own, and writes its result."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from nemo_like.config.secrets import masked
from nemo_like.driver.exit_codes import FAILED, FINISHED, INTERRUPTED, PREEMPTED, REFUSED, REWARDS_FAILED
from nemo_like.observability.bounded_log import kept_short
from nemo_like.observability.disk import write_whole
from nemo_like.observability.exits import how_it_ended
from nemo_like.observability.jsonl import json_object, read_metrics
from nemo_like.observability.printable import warn_on_stderr
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.terminal_echo import without_control_echo

RESULT = "job.json"
_OUTCOMES = {
    FINISHED: "finished",
    FAILED: "failed",
    REFUSED: "refused",
    REWARDS_FAILED: "failed: rewards",
    PREEMPTED: "preempted",
    INTERRUPTED: "interrupted",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """The result of a job; ``job.json`` in its directory holds the same."""

    number: int
    arguments: list[str]  # of the command line, without Hydra's own
    exit_code: int  # of the run; negative: the signal that ended it
    metric: str
    value: float | None  # the last value of ``metric``; None when it was never recorded
    steps: int
    seconds: float

    @property
    def outcome(self) -> str:
        """How the run ended, in a word or two."""
        return _OUTCOMES.get(self.exit_code, f"ended with {how_it_ended(self.exit_code)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One run of a sweep: ``command`` with ``arguments``, and ``directory`` as its run directory.

    ``names`` are further arguments, by which loggers tell the jobs apart. The output goes to the file
    ``log``, or to this process's output when that is None. ``metric`` is the metric by which the jobs are
    compared.
    """

    number: int
    command: Sequence[str]
    arguments: Sequence[str]
    names: Sequence[str]
    directory: Path
    log: Path | None
    metric: str

    def run(self) -> JobResult:
        """Run the job to its end. Every interrupt is passed on to it: upon the first it saves and ends, upon
        the second it ends at once. Raise KeyboardInterrupt then."""
        started = time.monotonic()
        in_directory = [
            f"logger.log_dir='{self.directory.parent}'",
            f"logger.run_name='{self.directory.name}'",
        ]
        # The job's own view may be on this terminal, whose foreground is this process.
        quiet = without_control_echo(sys.stdout) if self.log is None else nullcontext()
        with quiet, _new_log(self.log) if self.log else nullcontext() as output:
            exit_code, was_interrupted = _wait_for(
                [*self.command, *self.names, *self.arguments, *in_directory], output
            )
        result = self._result(exit_code, time.monotonic() - started)
        text = json.dumps(asdict(result), indent=1)
        write_whole(self.directory / RESULT, text.encode(), "what became of the job")
        if was_interrupted:
            raise KeyboardInterrupt
        return result

    def _result(self, exit_code: int, seconds: float) -> JobResult:
        path = RunDirectory(self.directory).metrics_path
        records = read_metrics(path, warn_on_stderr) if path.is_file() else []
        values = [record[self.metric] for record in records if record.get(self.metric) is not None]
        return JobResult(
            number=self.number,
            arguments=[masked(argument) for argument in self.arguments],
            exit_code=exit_code,
            metric=self.metric,
            value=values[-1] if values else None,
            steps=max((record["step"] for record in records), default=0),
            seconds=round(seconds, 1),
        )


class EndedJob(NamedTuple):
    """A job of a sweep that has ended, and its run directory."""

    result: JobResult
    directory: Path


def read_results(sweep: Path) -> list[EndedJob]:
    """Return the jobs below a sweep's directory, in their order; warn of a file without a result."""
    found: list[EndedJob] = []
    for file in sorted(sweep.rglob(RESULT)):
        result = _result_in(file)
        if result is None:
            warn_on_stderr(f"{file} holds no result of a job; its job is left out of the table")
        else:
            found.append(EndedJob(result, file.parent))
    return sorted(found, key=lambda job: job.result.number)


def own_arguments(results: Sequence[JobResult]) -> list[str]:
    """Return, for each job, the arguments that not all jobs have."""
    shared = set.intersection(*(set(result.arguments) for result in results)) if results else set()
    return [" ".join(each for each in result.arguments if each not in shared) for result in results]


def _result_in(file: Path) -> JobResult | None:
    try:
        result = JobResult(**(json_object(file.read_bytes()) or {}))
    except TypeError:
        return None
    numbers, arguments = (result.number, result.exit_code, result.steps), result.arguments
    is_result = all(type(one) is int for one in numbers) and isinstance(arguments, list)
    return result if is_result and isinstance(result.seconds, int | float) else None


@contextmanager
def _new_log(path: Path) -> Iterator[BinaryIO]:
    """Open an empty log, replacing an existing one, and keep it short during the ``with`` block."""
    path.unlink(missing_ok=True)
    with path.open("ab") as file, kept_short(path):
        yield file


def _wait_for(command: Sequence[str], output: BinaryIO | None) -> tuple[int, bool]:
    """Run a command to its end; return its exit code, and whether it was interrupted."""
    # In a process group of its own, a run gets the terminal's interrupt from here only, and so only once.
    process = subprocess.Popen(command, stdout=output, stderr=output, process_group=0)
    was_interrupted = False
    while True:
        try:
            return process.wait(), was_interrupted
        except KeyboardInterrupt:
            was_interrupted = True
            process.send_signal(signal.SIGINT)
