"""The sides of ``against_others.py``: how each is started, asked for turns, watched and ended."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

import psutil

from nemo_like.configuration import Config
from nemo_like.generation.environment import engine_environment
from scripts.bench.others.turns import ACCURACY, Turn, TurnRequest

ROOT = Path(__file__).resolve().parents[3]
TIMEOUT_S = 900.0  # of a start, and of a turn
END_TIMEOUT_S = 60.0
LOOK_PERIOD_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A side: the module of its process, and what it gets besides the keys of its size."""

    about: str
    module: str
    overrides: tuple[str, ...] = ()
    generator: str = "vllm"

    @property
    def is_ours(self) -> bool:
        return self.module == "our_side"

    @property
    def is_trl(self) -> bool:
        return self.module == "trl_side"


KINDS: Mapping[str, Kind] = {
    "synchronous": Kind(about="this framework", module="our_side"),
    "exact": Kind(
        about="this framework, exact overlap", module="our_side", overrides=("grpo.overlap=exact",)
    ),
    "ahead": Kind(
        about="this framework, one version ahead", module="our_side", overrides=("grpo.max_staleness=1",)
    ),
    "trl": Kind(about="TRL, transformers generates", module="trl_side", generator="transformers"),
    "trl_vllm": Kind(about="TRL, vLLM generates", module="trl_side"),
    "bare": Kind(about="vLLM, forward and backward alone", module="bare_side"),
}


def trl_problem(names: Sequence[str], trl: Path | None) -> str | None:
    """Return why the sides of TRL cannot run, with the command that makes its folder, or None."""
    wanted = [name for name in names if KINDS[name].is_trl]
    if not wanted or (trl is not None and (trl / "trl").is_dir()):
        return None
    where = "no folder is given" if trl is None else f"{trl} has none"
    return (
        f"{' and '.join(wanted)} need TRL, and {where}; make one by `python -m pip install --no-deps "
        f"--target {trl or 'DIR'} trl` and give it by --trl, or leave them out of --sides"
    )


class Side:
    """A started side. It is ready once ``wait_until_ready`` has returned."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], pipe: Connection, log: IO[bytes]) -> None:
        self._name, self._process, self._pipe, self._log = name, process, pipe, log

    def wait_until_ready(self) -> None:
        """Wait until the side has started. Raises RuntimeError with the end of its output if it cannot."""
        self._received()

    def turn(self, num_steps: int, *, measures_accuracy: bool) -> Turn:
        """Have the side make so many steps, and measure its accuracy after them where that is asked for.
        Raises RuntimeError with the end of its output if it cannot."""
        before_s = self._cpu_s()
        self._pipe.send(TurnRequest(num_steps))
        turn = replace(self._received(), cpu_s=self._cpu_s() - before_s)
        if not measures_accuracy:
            return turn
        self._pipe.send(ACCURACY)
        return replace(turn, accuracy=self._received())

    def peak_mib(self, num_steps: int) -> float:
        """Return the most memory that all processes of the side have together during so many steps; a page
        that several share counts once (PSS)."""
        self._pipe.send(TurnRequest(num_steps))
        looks = [self._pss()]  # steps may end before a second look
        while not self._pipe.poll(LOOK_PERIOD_S):
            looks.append(self._pss())
        self._received()
        return round(max(looks) / 2**20, 1)

    def end(self) -> None:
        """Ask the side to end, and kill its processes if they do not."""
        processes = self._processes()[1:]
        try:
            self._pipe.send(TurnRequest(num_steps=0))
            self._process.wait(END_TIMEOUT_S)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        for process in processes:
            if process.is_running():
                process.kill()

    def _processes(self) -> list[psutil.Process]:
        root = psutil.Process(self._process.pid)
        return [root, *root.children(recursive=True)]

    def _cpu_s(self) -> float:
        return sum(map(_cpu_s, self._processes()))

    def _pss(self) -> int:
        return sum(map(_pss, self._processes()))

    def _received(self) -> Any:
        try:
            if self._pipe.poll(TIMEOUT_S):
                return self._pipe.recv()
            problem = f"has not answered for {TIMEOUT_S:.0f} s"
        except EOFError:
            problem = "has ended"
        self._log.seek(0)
        said = self._log.read().decode(errors="replace")[-4000:]
        raise RuntimeError(f"the side {self._name} {problem}:\n{said}")


@contextmanager
def started(name: str, config: str, overrides: Sequence[str], env: Mapping[str, str]) -> Iterator[Side]:
    """Start a side with these variables, and end it when the block is left."""
    kind = KINDS[name]
    ours, theirs = Pipe()
    # Not by -m: datasets would pickle the main module's functions when it gives a map its name, and cannot.
    program = f"from scripts.bench.others.{kind.module} import main; main()"
    command = [sys.executable, "-c", program, "--pipe", str(theirs.fileno())]
    command += ["--config", config, "--generator", kind.generator, *overrides]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=env,
            pass_fds=[theirs.fileno()],
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        theirs.close()
        side = Side(name, process, ours, log)
        try:
            yield side
        finally:
            side.end()


def environment(kind: Kind, cfg: Config, trl: Path | None, num_threads: int) -> dict[str, str]:
    """Return a side's variables. The others get those that this framework gives its engines, since they make
    every process on CPUs faster, and ``num_threads``."""
    if kind.is_ours:
        return {**os.environ, "PYTHONPATH": str(ROOT)}
    found = {
        **os.environ,
        **engine_environment(cfg.policy.device),
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # whole GiB
    }
    if kind.is_trl and trl is not None:
        # TRL has no argument with which vLLM would not compile.
        del found["TORCHDYNAMO_DISABLE"]
        found["PYTHONPATH"] = os.pathsep.join([str(trl.absolute()), str(ROOT)])
    return found


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _pss(process: psutil.Process) -> int:
    try:
        return int(process.memory_full_info().pss)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return 0
