"""scripts/slurm/ports.py, which keeps the Rays of several jobs on one machine apart."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "slurm" / "ports.py"
WIDTH = 10
# A place of this test process alone, below the ports that Linux gives to whoever asks for any.
BASE = 12000 + 200 * (os.getpid() % 100)


@pytest.fixture
def claims() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def claim(stack: ExitStack, base: int = BASE, width: int = WIDTH) -> tuple[int, subprocess.Popen[str]]:
    """What a process claims, and the process, which holds it until the end of the test."""
    command = [sys.executable, str(SCRIPT), str(base), str(width)]
    process = stack.enter_context(
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    return int(process.stdout.readline()), process


def test_claims_of_several_processes_do_not_overlap_and_end_with_them(claims: ExitStack) -> None:
    (first, _), (second, holder), (third, _) = (claim(claims) for _ in range(3))
    assert (second - first, third - second) == (WIDTH, WIDTH)
    holder.kill()
    holder.wait()
    assert claim(claims)[0] == second


def test_a_claim_ends_with_standard_input(claims: ExitStack) -> None:
    first, holder = claim(claims)
    assert holder.stdin is not None
    holder.stdin.close()
    holder.wait(timeout=30)
    assert claim(claims)[0] == first


def test_a_range_with_one_port_in_use_is_passed_over(claims: ExitStack) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", BASE + 3))
        other.listen()
        assert claim(claims)[0] == BASE + WIDTH


def test_it_says_when_no_range_is_free() -> None:
    functions = runpy.run_path(str(SCRIPT))
    with ExitStack() as taken:
        for index in range(functions["RANGES"]):
            taken.enter_context(functions["bind"](BASE + index * WIDTH))
        with pytest.raises(SystemExit, match=f"no {WIDTH} ports in a row are free between {BASE} and"):
            functions["claim"](BASE, WIDTH)


@pytest.mark.parametrize("base", ["80", "60000"])
def test_a_base_that_leaves_no_room_is_refused(base: str) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), base, "1000"], capture_output=True, text=True, check=False, timeout=30
    )
    assert done.returncode == 1 and f"PORT_BASE={base} must be between 1024 and 45536" in done.stderr
