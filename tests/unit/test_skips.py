"""Under CI=true a skip is a failure that names test, reason and rule, unless it is for want of a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from tests.lacking import NO_GPU, RULE, fall_back

ROOT = Path(__file__).resolve().parents[2]
SKIPPING = """
import unittest
import pytest

def test_that_runs(): pass

def test_in_a_test(): pytest.skip('no tool')

@pytest.fixture
def tool(): pytest.skip('no tool')

def test_in_a_fixture(tool): pass

@pytest.mark.skipif(True, reason='no tool')
def test_by_a_mark(): pass

@pytest.mark.parametrize('x', [pytest.param(1, marks=pytest.mark.skip(reason='no tool'))])
def test_by_a_parameter(x): pass

def test_by_unittest(): raise unittest.SkipTest('no tool')

@pytest.mark.gpu
@pytest.mark.skipif(True, reason='no tool')
def test_on_a_gpu(): pass
"""
IN_THE_CALL = ("test_in_a_test", "test_by_unittest")
BEFORE_IT = ("test_in_a_fixture", "test_by_a_mark", "test_by_a_parameter[1]", "test_on_a_gpu")
MODULES = {
    "test_skipping.py": "import pytest\npytest.skip('no tool', allow_module_level=True)",
    "test_importing.py": "import pytest\npytest.importorskip('no_such_module', reason='no tool')",
    "test_running.py": "def test_that_runs(): pass",
}

# In the place of PyTorch, which takes longer to load than the tests to run.
NO_DEVICE = "class cuda:\n    is_available = staticmethod(lambda: False)"
# Without the plugins of other packages, which take longer to load than the tests to run.
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_PLUGINS": "xdist.plugin"}

Pytest = Callable[..., subprocess.CompletedProcess[str]]

one_and_two_processes = pytest.mark.parametrize(
    "processes", [(), ("--numprocesses=2",)], ids=["one process", "two processes"]
)


@pytest.fixture
def run(tmp_path: Path) -> Pytest:
    """``run({"test_it.py": code}, *arguments, CI="true")``: pytest on them, with this suite's hooks."""

    def run(
        modules: Mapping[str, str], processes: Sequence[str] = (), **env: str
    ) -> subprocess.CompletedProcess[str]:
        for name, code in {**modules, "torch.py": NO_DEVICE}.items():
            (tmp_path / name).write_text(code)
        (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu")
        return subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-p", "no:cacheprovider", *processes],
            cwd=tmp_path,
            env={**os.environ, **ALONE, "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=60,
        )

    return run


def counts(done: subprocess.CompletedProcess[str]) -> dict[str, int]:
    """How many tests had which outcome, from pytest's last line."""
    last = done.stdout.rstrip().splitlines()[-1]
    return {outcome: int(number) for number, outcome in re.findall(r"(\d+) (\w+)", last.split(" in ")[0])}


@one_and_two_processes
def test_a_skip_is_a_failure_under_ci(run: Pytest, processes: tuple[str, ...]) -> None:
    done = run({"test_it.py": SKIPPING}, processes, CI="true")
    assert done.returncode == 1
    assert counts(done) == {"failed": len(IN_THE_CALL), "passed": 1, "errors": len(BEFORE_IT)}
    for name in (*IN_THE_CALL, *BEFORE_IT):
        assert f"test_it.py::{name} was skipped: no tool\n{RULE}" in done.stdout


@one_and_two_processes
def test_a_module_that_skips_itself_is_an_error_under_ci(run: Pytest, processes: tuple[str, ...]) -> None:
    done = run(MODULES, processes, CI="true")
    assert done.returncode not in (0, 5)
    for name in ("test_skipping.py", "test_importing.py"):
        assert f"{name} was skipped: no tool\n{RULE}" in done.stdout


def test_a_skip_is_a_skip_elsewhere(run: Pytest) -> None:
    done = run({"test_it.py": SKIPPING, **MODULES}, CI="false")
    assert done.returncode == 0
    assert counts(done) == {"passed": 2, "skipped": len(IN_THE_CALL) + len(BEFORE_IT) + 2}


def test_want_of_a_gpu_is_no_failure_and_an_expected_failure_is_no_skip(run: Pytest) -> None:
    code = f"""
import pytest

@pytest.mark.gpu
def test_on_a_gpu(): pass

def test_with_a_gpu(): pytest.skip("{NO_GPU}")

@pytest.mark.xfail
def test_expected(): raise ValueError
"""
    done = run({"test_it.py": code}, CI="true")
    assert done.returncode == 0, done.stdout
    assert counts(done) == {"skipped": 2, "xfailed": 1}


def test_a_fall_back_is_a_failure_under_ci_and_a_warning_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match=f"^no tool; {re.escape(RULE)}$"):
        fall_back("no tool")
    monkeypatch.setenv("CI", "false")
    with pytest.warns(UserWarning, match="^no tool$"):
        fall_back("no tool")
