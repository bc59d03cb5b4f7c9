"""Python environments with packages that do not fit beside those of this project; tests keep them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from tests.functional.runs import ROOT

_FOLDER = ROOT / ".cache/harness"
_INSTALL_TIMEOUT_S = 600


def environment_of(name: str, requirements: Path) -> Path:
    """Return an environment with exactly these packages; made on first use, and anew when they change."""
    folder, pinned = _FOLDER / name, requirements.read_bytes()
    stamp = folder / "installed"
    digest = hashlib.sha256(pinned + sys.version.encode()).hexdigest()
    if not stamp.is_file() or stamp.read_text() != digest:
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, "-m", "venv", str(folder))
        _run(str(folder / "bin/python"), *_pip("-r", str(requirements)))
        _run(str(folder / "bin/python"), "-m", "pip", "check")
        stamp.write_text(digest)
    return folder


def packages_of(name: str, *pins: str) -> Path:
    """Return a folder with exactly these packages, for PYTHONPATH, where they hide those of this project."""
    folder = _FOLDER / name
    if not (folder / "installed").is_file() or (folder / "installed").read_text() != str(pins):
        shutil.rmtree(folder, ignore_errors=True)
        _run(sys.executable, *_pip("--target", str(folder), *pins))
        (folder / "installed").write_text(str(pins))
    return folder


def _pip(*arguments: str) -> list[str]:
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps")
    return ["-m", "pip", "install", *quiet, *arguments]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
