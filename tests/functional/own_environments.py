"""Python environments with packages that do not fit beside those of this project; tests keep them."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.functional.runs import ROOT

_FOLDER = ROOT / ".cache/harness"
_INSTALL_TIMEOUT_S = 600


def environment_of(name: str, requirements: Path) -> Path:
    """Return an environment with exactly these packages; made on first use, and anew when they change."""
    folder, pinned = _FOLDER / name, requirements.read_bytes()
    with _made_once(folder, hashlib.sha256(pinned + sys.version.encode()).hexdigest()) as is_missing:
        if is_missing:
            _run(sys.executable, "-m", "venv", str(folder))
            _run(str(folder / "bin/python"), *_pip("-r", str(requirements)))
            _run(str(folder / "bin/python"), "-m", "pip", "check")
    return folder


def packages_of(name: str, *pins: str) -> Path:
    """Return a folder with exactly these packages, for PYTHONPATH, where they hide those of this project."""
    folder = _FOLDER / name
    with _made_once(folder, str(pins)) as is_missing:
        if is_missing:
            _run(sys.executable, *_pip("--target", str(folder), *pins))
    return folder


@contextmanager
def _made_once(folder: Path, content: str) -> Iterator[bool]:
    """Yield whether the block has to make ``folder`` with this content, while no other process does."""
    _FOLDER.mkdir(parents=True, exist_ok=True)
    stamp = folder / "installed"
    with open(f"{folder}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        is_missing = not stamp.is_file() or stamp.read_text() != content
        if is_missing:
            shutil.rmtree(folder, ignore_errors=True)
        yield is_missing
        if is_missing:
            stamp.write_text(content)


def _pip(*arguments: str) -> list[str]:
    quiet = ("--quiet", "--no-input", "--disable-pip-version-check", "--no-deps")
    return ["-m", "pip", "install", *quiet, *arguments]


def _run(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_INSTALL_TIMEOUT_S)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
