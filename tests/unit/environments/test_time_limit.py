"""Which programs run out of time, which of them are starved, and how their CPU time is counted."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_like.environments import time_limit as module
from nemo_like.environments.cpu_account import ControlGroup, Look, ProcessTrees, control_group
from nemo_like.environments.time_limit import PATIENCE, Starved, time_limit

LIMIT_S = 0.3


class Program:
    """Stands for a program's processes: it uses a share of the time by the clock as CPU time."""

    def __init__(self, share: float, *, is_waiting: bool) -> None:
        self._share, self._is_waiting = share, is_waiting
        self._began_s = time.monotonic()

    def look(self) -> Look:
        return Look(self._share * (time.monotonic() - self._began_s), self._is_waiting)


def how_it_ends(
    program: Program, monkeypatch: pytest.MonkeyPatch, limit_s: float = LIMIT_S
) -> tuple[type[BaseException], float]:
    """The error that ends a block on a program which does not end by itself, and when it does."""

    async def run() -> None:
        async with time_limit(limit_s) as limit:
            limit.watch(0, None)
            await asyncio.sleep(60)

    monkeypatch.setattr(module, "ProcessTrees", lambda roots: program)
    began_s = time.monotonic()
    with pytest.raises((TimeoutError, Starved)) as caught:
        asyncio.run(run())
    return caught.type, time.monotonic() - began_s


def test_a_program_that_sleeps_runs_out_of_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, after_s = how_it_ends(Program(0.0, is_waiting=False), monkeypatch)
    assert kind is TimeoutError and LIMIT_S < after_s < PATIENCE * LIMIT_S


def test_processes_use_up_the_time_together(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, after_s = how_it_ends(Program(8.0, is_waiting=True), monkeypatch, limit_s=4.0)
    assert kind is TimeoutError and 0.5 <= after_s < 4.0


def test_a_program_with_half_a_cpu_has_twice_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, after_s = how_it_ends(Program(0.5, is_waiting=True), monkeypatch)
    assert kind is TimeoutError and 1.9 * LIMIT_S < after_s < PATIENCE * LIMIT_S


def test_a_program_that_gets_nothing_is_starved(monkeypatch: pytest.MonkeyPatch) -> None:
    kind, after_s = how_it_ends(Program(0.01, is_waiting=True), monkeypatch)
    assert kind is Starved and after_s > PATIENCE * LIMIT_S


def test_a_block_that_ends_in_time_is_left_alone() -> None:
    async def run() -> str:
        async with time_limit(LIMIT_S) as limit:
            limit.watch(0, None)
            return "done"

    assert asyncio.run(run()) == "done"


class LostGroup(ControlGroup):
    """A group that somebody removed."""

    def cpu_s(self) -> float:
        raise OSError("no such device")


def test_a_program_whose_group_is_gone_still_runs_out_of_time() -> None:
    async def run() -> None:
        async with time_limit(LIMIT_S) as limit:
            process = await asyncio.create_subprocess_exec("sleep", "60")
            try:
                limit.watch(process.pid, LostGroup(Path("/nowhere")))
                await asyncio.sleep(60)
            finally:
                process.kill()
                await process.wait()

    with pytest.raises(TimeoutError):
        asyncio.run(run())


SPINNERS = """
import os, time
def spin():
    while time.process_time() < 0.3: pass
for wait in (True, False):
    child = os.fork()
    if child == 0:
        spin()
        if wait: os._exit(0)
        time.sleep(60)
    if wait: os.waitpid(child, 0)
print("spinning", flush=True)
time.sleep(60)
"""


@pytest.fixture
def group() -> Iterator[ControlGroup | None]:
    with control_group() as found:
        yield found


def test_the_time_of_children_that_live_and_that_ended_is_counted(group: ControlGroup | None) -> None:
    command = [sys.executable, "-I", "-S", "-c", SPINNERS]
    if group is not None:
        command = group.entered(command)
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        trees = ProcessTrees([process.pid])
        deadline_s = time.monotonic() + 30
        while (look := trees.look()).cpu_s < 0.5 or look.is_waiting:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert look.cpu_s < 1.5
        if group is not None:
            assert group.cpu_s() == pytest.approx(look.cpu_s, abs=0.3)
        process.kill()


def test_a_process_that_is_gone_has_used_what_was_seen_last() -> None:
    with subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"]) as process:
        trees, deadline_s = ProcessTrees([process.pid]), time.monotonic() + 30
        while (seen := trees.look()).cpu_s == 0:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        process.kill()
    assert seen.cpu_s == trees.look().cpu_s and not trees.look().is_waiting
