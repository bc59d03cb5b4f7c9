"""One run that is disturbed: the same command again and again until it is through.

Two threads per start put what happens (a line that the run prints, its end) into a queue; the main thread
waits for the next of these or for the next thing to do, whichever comes first.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.chaos.plan import NUM_STEPS, Blow, Disturbance, Phase
from tests.chaos.victims import Role, choose, processes_by_role
from tests.functional.runs import MARK, kill_all, running, temporary_files, wait_until_gone

# Longer than every deadline of variants/small.yaml, and the time that a report on one takes.
SILENCE_S = 240.0
CONSEQUENCES_S = 12.0
_GONE_S = 20.0
# Ray's agents try for a minute to report the death of their parent.
_AGENTS_GONE_S = 180.0

_STEP = re.compile(r"step (\d+)/")
_ENDINGS = {0: "The run ", 1: "The run failed: ", 3: "The run ", 75: "was stopped: ", 130: "was interrupted"}
# Whoever interrupts a run before it has begun, or while it writes its results, gets no summary of it.
_BEGUN, _CUT_SHORT = "starting Ray", "interrupted before all results were written"
# Of other signals the driver ends as of SIGKILL, and its exit code says of which.
_REQUESTS = ("SIGINT", "SIGTERM")


@dataclass(frozen=True, slots=True)
class Speed:
    """Seconds that the phases of the undisturbed run lasted."""

    start_s: float
    step_s: float
    end_s: float

    def delay_s(self, disturbance: Disturbance) -> float:
        """From when its phase begins; a step's stages may take part in the next two steps too."""
        seconds = {
            Phase.start: self.start_s,
            Phase.step: 3 * self.step_s,
            Phase.end: self.end_s,
            Phase.disturbance: CONSEQUENCES_S,
        }
        return disturbance.moment.share * seconds[disturbance.moment.phase]


@dataclass(slots=True)
class Started:
    """One start of the command."""

    process: subprocess.Popen[str]
    began: float  # time.monotonic()
    lines: list[tuple[float, str]] = field(default_factory=list)
    signals: set[str] = field(default_factory=set)  # that the driver was sent
    num_disturbances: int = 0
    ended: float | None = None

    def text(self) -> str:
        return "".join(line for _, line in self.lines)

    def speed(self, last_step: int) -> dict[str, float]:
        """Of a run that nothing disturbed; the fields of ``Speed``."""
        steps = {int(match[1]): at for at, line in self.lines if (match := _STEP.match(line))}
        assert self.ended is not None
        return {
            "start_s": steps[1] - self.began,
            "step_s": (steps[last_step] - steps[1]) / (last_step - 1),
            "end_s": self.ended - steps[last_step],
        }

    def summary(self) -> dict[str, Any]:
        """Exit code, duration, and the sentence with which it ended."""
        endings = [line.strip() for _, line in self.lines if line.startswith("The run ")]
        return {
            "returncode": self.process.returncode,
            "seconds": round((self.ended or time.monotonic()) - self.began, 1),
            "ending": endings[-1] if endings else "",
        }


class DisturbedRun:
    """``problems`` are the ways in which the run was not what was promised."""

    def __init__(
        self, directory: Path, config: Path, name: str, plan: tuple[Disturbance, ...], speed: Speed | None
    ) -> None:
        self.directory, self.config, self.name = directory, config, name
        self.run_dir = directory / name
        self.problems: list[str] = []
        self.happened: list[dict[str, Any]] = []
        self.starts: list[Started] = []
        self._plan, self._speed = list(plan), speed
        self._events: queue.Queue[tuple[float, str | None]] = queue.Queue()
        self._step = 0  # latest that was reported since all processes started
        self._reached: float | None = None  # when the phase of the next disturbance began
        self._hit: float | None = None  # when the latest disturbance happened
        self._resuming: list[tuple[float, psutil.Process]] = []

    def run(self) -> None:
        """Start it until it is through, or until it fails to do what is promised."""
        log = (self.directory / f"{self.name}.log").open("w", encoding="utf-8")
        with log:
            self._log = log
            for _ in range(len(self._plan) + 2):
                with self._started() as started:
                    self._follow(started)
                    self._judge(started)
                if started.process.returncode == 0 or self.problems:
                    break
            else:
                self.problems.append(f"did not finish in {len(self.starts)} starts")
            was_killed = any(start.process.returncode < 0 for start in self.starts)
            self._check_gone(_AGENTS_GONE_S if was_killed else _GONE_S)

    def with_consequences(self) -> list[dict[str, Any]]:
        """What happened, each with what the run did until the next disturbance."""
        told = []
        for number, one in enumerate(self.happened):
            after = self.happened[number + 1] if number + 1 < len(self.happened) else None
            started = self.starts[one["start"] - 1]
            ends_here = after is None or after["start"] != one["start"]
            lines = started.lines[
                one["after_line"] : None if ends_here or after is None else after["after_line"]
            ]
            then = [word for word in ("recovery", "restart") if any(f"({word} " in line for _, line in lines)]
            if ends_here and started.process.returncode != 0:
                then.append(f"exit {started.process.returncode}")
            told.append({**one, "then": " and ".join(then) or "nothing"})
        return told

    @contextmanager
    def _started(self) -> Iterator[Started]:
        with running(self.directory, name=self.name, config=str(self.config)) as (process, _, _):
            started = Started(process, time.monotonic())
            self.starts.append(started)
            self._note(f"start {len(self.starts)}, process {process.pid}")
            self._step, self._reached = 0, None
            for target in (self._read, self._wait):
                threading.Thread(target=target, args=(process,), daemon=True).start()
            yield started

    def _read(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self._events.put((time.monotonic(), line))

    def _wait(self, process: subprocess.Popen[str]) -> None:
        process.wait()
        self._events.put((time.monotonic(), None))

    def _follow(self, started: Started) -> None:
        """Read what the run prints, and do what is planned, until it ends."""
        quiet_since = started.began
        while started.ended is None:
            self._look_at_next(started)
            due = min([quiet_since + SILENCE_S, *self._dues()])
            try:
                at, line = self._events.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                if due == quiet_since + SILENCE_S:
                    self._give_up(started)
                    return
                if self._do_what_is_due(started):
                    quiet_since = time.monotonic()
                continue
            quiet_since = at
            if line is None:
                started.ended = at
            else:
                self._hear(started, at, line)
        while not self._events.empty():  # what was printed last
            at, line = self._events.get()
            if line is not None:
                self._hear(started, at, line)
        self._note(f"ended with exit code {started.process.returncode}")

    def _hear(self, started: Started, at: float, line: str) -> None:
        started.lines.append((at, line))
        self._log.write(f"{at - started.began:8.2f}  {line}")
        self._log.flush()
        if match := _STEP.match(line):
            self._step = int(match[1])
            self._look_whether_step_is_reached(at)

    def _look_whether_step_is_reached(self, at: float) -> None:
        """Whether the report that was just printed begins the phase of the next disturbance: so the run has
        got over the one before."""
        if not self._plan or self._reached is not None:
            return
        moment = self._plan[0].moment
        needed = {Phase.step: moment.step, Phase.end: NUM_STEPS}.get(moment.phase)
        if needed is not None and self._step >= needed:
            self._reached = at

    def _look_at_next(self, started: Started) -> None:
        """Whether the phase of the next disturbance has begun, if no report begins it."""
        if self._plan and self._reached is None:
            moment = self._plan[0].moment
            if moment.phase is Phase.start:
                self._reached = started.began
            elif moment.phase is Phase.disturbance:
                self._reached = self._hit or started.began

    def _dues(self) -> Iterator[float]:
        if self._plan and self._reached is not None and self._speed is not None:
            yield self._reached + self._speed.delay_s(self._plan[0])
        yield from (due for due, _ in self._resuming)

    def _do_what_is_due(self, started: Started) -> bool:
        now = time.monotonic()
        for due, process in [*self._resuming]:
            if due <= now:
                self._resuming.remove((due, process))
                if process.is_running():
                    process.resume()
                    self._note(f"SIGCONT to process {process.pid}")
        if not self._plan or self._reached is None or next(self._dues()) > now:
            return False
        self._disturb(started, self._plan.pop(0))
        self._reached, self._hit = None, time.monotonic()
        return True

    def _disturb(self, started: Started, disturbance: Disturbance) -> None:
        found = processes_by_role(self.name, self.run_dir, started.process.pid)
        hit = [self._hit_one(started, found, blow) for blow in disturbance.blows]
        started.num_disturbances += 1
        self.happened.append(
            {
                "phase": disturbance.moment.phase.value,
                "start": len(self.starts),
                "at_s": round(time.monotonic() - started.began, 2),
                "after_line": len(started.lines),
                "step": self._step,
                "hit": [one for one in hit if one],
            }
        )

    def _hit_one(
        self, started: Started, found: dict[Role, list[psutil.Process]], blow: Blow
    ) -> dict[str, Any] | None:
        if blow.role is Role.terminal:
            os.killpg(started.process.pid, signal.Signals[blow.signal])
            started.signals.add(blow.signal)
            self._note(f"{blow.signal} to the process group")
            return {**_plain(blow), "role": blow.role.value}
        chosen = choose(found, blow.role, blow.pick)
        if chosen is None:
            return None
        role, process = chosen
        pause_s = blow.pause_s
        if role is Role.driver:
            if blow.signal == "SIGSTOP" and pause_s is None:
                pause_s = 1.0
            started.signals.add(blow.signal)
        try:
            title = " ".join(process.cmdline()).strip()[:60]
            process.send_signal(signal.Signals[blow.signal])
        except psutil.NoSuchProcess:
            return None
        if pause_s is not None:
            self._resuming.append((time.monotonic() + pause_s, process))
        self._note(f"{blow.signal} to {role.value}, process {process.pid} {title!r}, pause {pause_s}")
        return {**_plain(blow), "role": role.value, "meant": blow.role.value, "title": title}

    def _judge(self, started: Started) -> None:
        """Whether this start ended as it may."""
        code, text = started.process.returncode, started.text()
        if code is None:
            return
        if code != 0 and not started.num_disturbances:
            self.problems.append(f"start {len(self.starts)} ended with {code} and nothing had disturbed it")
        if code < 0:
            name = signal.Signals(-code).name
            if name not in started.signals or name in _REQUESTS:
                self.problems.append(
                    f"start {len(self.starts)} ended by {name}; it was sent {started.signals}"
                )
            return
        if code == 130 and (_BEGUN not in text or _CUT_SHORT in text):
            return
        if _ENDINGS.get(code, "no such exit code is documented") not in text:
            self.problems.append(f"start {len(self.starts)} ended with {code} and no sentence that says why")
        elif not text.rstrip().endswith(f"run_dir: {self.run_dir}"):
            self.problems.append(f"start {len(self.starts)} printed no run_dir as its last line")
        if "Traceback (most recent call last)" in text:
            self.problems.append(f"start {len(self.starts)} printed a traceback")
        if all(start.process.returncode >= 0 for start in self.starts):
            self._check_gone(_GONE_S)
            names = temporary_files(self.name)
            if any(hit["role"] == Role.helper.value for one in self.happened for hit in one["hit"]):
                names = [name for name in names if not name.startswith("wandb-")]  # of W&B's own process
            if names:
                self.problems.append(f"left in TMPDIR: {', '.join(names)}")

    def _check_gone(self, timeout_s: float) -> None:
        if left := wait_until_gone(self.name, timeout_s):
            self.problems.append(f"processes left after {timeout_s:g} s: {'; '.join(left)}")
            self._dump_stacks()
            kill_all(self.name)

    def _give_up(self, started: Started) -> None:
        self.problems.append(f"hung: nothing was printed for {SILENCE_S:g} s; {self._dump_stacks()}")
        kill_all(self.name)
        started.process.wait()

    def _dump_stacks(self) -> str:
        """Stacks of every process of the run; says where they are."""
        path = self.directory / f"{self.name}-stacks-{len(self.starts)}.txt"
        py_spy = shutil.which("py-spy") or "py-spy"
        with path.open("w", encoding="utf-8") as file:
            for process in psutil.process_iter():
                try:
                    if process.environ().get(MARK) != self.name:
                        continue
                    print(f"== {process.pid} {process.status()} {process.cmdline()}", file=file, flush=True)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
                command = [py_spy, "dump", "--nonblocking", "--pid", str(process.pid)]
                subprocess.run(command, stdout=file, stderr=file, timeout=60, check=False)
        return f"stacks are in {path}"

    def _note(self, text: str) -> None:
        began = self.starts[-1].began
        self._log.write(f"{time.monotonic() - began:8.2f}  ---- {text}\n")
        self._log.flush()


def _plain(blow: Blow) -> dict[str, Any]:
    return {name: value for name, value in asdict(blow).items() if name in ("signal", "pause_s")}
