"""``scripts/test.sh``: the order of its pieces, its report, and where it goes on. Its tools are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test.sh"
TOOLS = ("ruff", "mypy", "lint-imports", "pytest")
# Says that it runs, and fails for what $FAILING names.
TOOL = """#!/bin/bash
echo "$(basename "$0") $*" >>calls
echo "1.50s call a_slow_test[$*]"
[[ -z "$FAILING" || "$(basename "$0") $*" != *"$FAILING"* ]]
"""


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A project of three files of functional tests, of which two make whole runs."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    executable(tmp_path / "scripts" / "setup.sh", "echo set up\n")
    for tool in TOOLS:
        executable(tmp_path / ".venv" / "bin" / tool, TOOL)
    tests = tmp_path / "tests" / "functional"
    tests.mkdir(parents=True)
    (tests / "test_parts.py").touch()
    for name in ("agents", "watch"):
        (tests / f"test_{name}.py").write_text("pytestmark = pytest.mark.whole_run\n")
    return tmp_path


def run(clone: Path, *arguments: str, failing: str = "") -> subprocess.CompletedProcess[str]:
    """Run the script in the clone, where calls of tools with the text ``failing`` fail."""
    return subprocess.run(
        ["bash", "scripts/test.sh", *arguments],
        cwd=clone,
        env={"PATH": "/usr/bin:/bin", "FAILING": failing},
        capture_output=True,
        text=True,
        timeout=60,
    )


def report(clone: Path, what: str) -> dict[str, int]:
    """The exit code of each piece in the report, in the order of its lines."""
    lines = (clone / ".cache" / f"test_report.{what}").read_text().splitlines()
    fields = [line.split("\t") for line in lines]
    return {name: int(code) for _, code, name in fields}


LINT = ["lint", "format", "types", "imports"]
ALL = ["set-up", *LINT, "unit", "functional", "agents", "watch"]


def test_the_quick_tests_are_two_pieces_and_none_is_slow(clone: Path) -> None:
    done = run(clone)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("\nall checks passed\n")
    assert report(clone, "quick") == dict.fromkeys(["set-up", *LINT, "unit", "functional"], 0)
    calls = (clone / "calls").read_text().splitlines()
    assert calls[:4] == ["ruff check .", "ruff format --check .", "mypy ", "lint-imports "]
    assert all("-m not slow" in call for call in calls[4:])
    assert "tests/functional/test_parts.py" in calls[5]


def test_only_what_reads_the_code(clone: Path) -> None:
    assert run(clone, "--lint").returncode == 0
    assert list(report(clone, "lint")) == ["set-up", *LINT]


def test_all_goes_on_after_a_failure_says_what_is_left_and_ends_with_what_failed(clone: Path) -> None:
    done = run(clone, "--all", failing="test_agents.py")
    assert done.returncode == 1
    assert report(clone, "all") == dict.fromkeys(ALL, 0) | {"functional": 1, "agents": 1}
    assert "\n== piece 7 of 8; left: agents watch\n" in done.stdout
    assert "\nthe slowest tests\n" in done.stdout
    assert "1.50s call a_slow_test" in done.stdout.partition("\nthe slowest tests\n")[2]
    failed = done.stderr.partition("failed:\n")[2].splitlines()
    assert [line.split(":")[0].strip() for line in failed] == [
        "functional",
        "agents",
        "to go on from a piece",
    ]

    # What is run again replaces what the report has of it; what ran before stays.
    done = run(clone, "--all", "--from", "functional")
    assert done.returncode == 0
    assert report(clone, "all") == dict.fromkeys(ALL, 0)
    assert list(report(clone, "all"))[-3:] == ["functional", "agents", "watch"]


def test_a_new_clone_may_begin_with_any_piece(clone: Path) -> None:
    done = run(clone, "--all", "--from", "agents")
    assert (done.returncode, done.stderr) == (0, "")
    assert report(clone, "all") == {"agents": 0, "watch": 0}


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--al"], "unknown argument --al"),
        (["--from", "unit"], "--from needs --all before it and the name of a piece"),
        (["--all", "--from"], "--from needs --all before it and the name of a piece"),
        (["--all", "--from", "agent"], "there is no piece agent; there are lint format types imports unit"),
    ],
)
def test_unknown_arguments_and_pieces_are_refused(clone: Path, arguments: list[str], rule: str) -> None:
    done = run(clone, *arguments)
    assert done.returncode == 2
    assert rule in done.stderr
    assert "usage: scripts/test.sh [--lint | --all [--from PIECE]]" in done.stderr
    assert not (clone / "calls").exists()
