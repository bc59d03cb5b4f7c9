"""``scripts/setup.sh`` on machines that lack something, in a copy of the checkout without an environment."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

Setup = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", root / "scripts")
    shutil.copytree(REPOSITORY / "requirements", root / "requirements")
    return root


@pytest.fixture
def setup(checkout: Path, tmp_path: Path) -> Setup:
    """``setup({"tool": "what it prints"}, ...)``: the script with these programs ahead on PATH."""

    def run(programs: Mapping[str, str], *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / "programs"
        folder.mkdir(exist_ok=True)
        for name, body in programs.items():
            (folder / name).write_text(f"#!/bin/sh\n{body}\n")
            (folder / name).chmod(0o755)
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", "scripts/setup.sh", *arguments],
            cwd=checkout,
            env={**os.environ, "PATH": path, **env},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def test_an_old_python_is_named_with_the_version_that_is_needed(setup: Setup) -> None:
    old = 'case "$1" in --version) echo "Python 3.9.2" ;; *) exit 1 ;; esac'
    done = setup({"old-python": old}, PYTHON="old-python")
    assert done.returncode == 1
    assert "Python 3.11 or newer is needed, and was not found." in done.stderr
    assert "Found: old-python is Python 3.9.2" in done.stderr


def test_no_python_at_all_is_said(setup: Setup) -> None:
    done = setup({}, PYTHON="no-such-python")
    assert done.returncode == 1
    assert "Found: no Python at all" in done.stderr


def test_a_full_disk_says_how_much_is_needed_and_free(setup: Setup) -> None:
    df = "echo Filesystem 1024-blocks Used Available Capacity Mounted; echo disk 9 9 2100000 9% /"
    done = setup({"df": df})
    assert done.returncode == 1
    assert "5 GB of free disk are needed here, 2 GB are free" in done.stderr


def test_another_kind_of_machine_is_refused(setup: Setup) -> None:
    done = setup({"uname": 'case "$1" in -s) echo Darwin ;; *) echo arm64 ;; esac'})
    assert done.returncode == 1
    assert "the pinned packages are for Linux on x86_64; this is Darwin on arm64." in done.stderr


def test_an_unknown_argument_shows_the_usage(setup: Setup) -> None:
    done = setup({}, "--everything")
    assert done.returncode == 1
    assert "unknown argument --everything; usage: scripts/setup.sh [--dev]" in done.stderr


def test_pytorch_for_cuda_says_where_to_point_pip(setup: Setup, checkout: Path) -> None:
    packages = checkout / ".venv" / "lib"
    (packages / "torch").mkdir(parents=True)
    (packages / "torch" / "version.py").write_text("__version__ = '9.9.9'\ncuda = '13.0'\n")
    (packages / "torch-9.9.9.dist-info").mkdir()
    (packages / "torch-9.9.9.dist-info" / "METADATA").write_text("Name: torch\nVersion: 9.9.9\n")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir()
    # An environment in which pip does nothing and site-packages is the folder above.
    python.write_text(
        f"""#!/bin/sh
[ "$1 $2" = "-m pip" ] && exit 0
exec env PYTHONPATH={packages} {sys.executable} -c '
import io, sys, sysconfig
sysconfig.get_path = lambda name: "{packages}"
source = sys.argv[2] if sys.argv[1:2] == ["-c"] else sys.stdin.read()
exec(source)' "$@"
"""
    )
    python.chmod(0o755)
    done = setup({})
    assert done.returncode == 1
    assert "a build for CUDA 13.0 (torch 9.9.9)" in done.stderr
    assert "PIP_EXTRA_INDEX_URL" in done.stderr


@pytest.mark.parametrize(
    ("installed", "asked", "is_done"),
    [
        (["cpu.txt"], (), True),
        (["cpu.txt", "dev.txt"], (), True),
        (["cpu.txt", "dev.txt"], ("--dev",), True),
        (["cpu.txt"], ("--dev",), False),
    ],
    ids=["the same", "more than asked", "with the tools", "without the tools"],
)
def test_what_is_installed_already_is_left_alone(
    setup: Setup, checkout: Path, installed: list[str], asked: tuple[str, ...], is_done: bool
) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    content = b"".join((checkout / "requirements" / name).read_bytes() for name in installed)
    (checkout / ".venv" / "installed").write_text(hashlib.sha256(content).hexdigest() + "\n")
    # Anything still to do would stop at the disk check.
    done = setup({"df": "echo header; echo disk 9 9 0 9% /"}, *asked)
    assert (done.returncode == 0) is is_done
    assert done.stdout == ""


def test_a_change_of_the_requirements_installs_again(setup: Setup, checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    requirements = checkout / "requirements" / "cpu.txt"
    (checkout / ".venv" / "installed").write_text(
        hashlib.sha256(requirements.read_bytes()).hexdigest() + "\n"
    )
    requirements.write_text(requirements.read_text() + "another==1.0\n")
    assert "5 GB of free disk are needed" in setup({"df": "echo header; echo disk 9 9 0 9% /"}).stderr
