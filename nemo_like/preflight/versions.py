"""Compares the installed packages with the tested versions, since private parts of some packages are used."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.observability.software import installed_version, package_ranges


def untested_versions() -> Iterator[str]:
    """Yield a line for each installed package outside its tested version range. Imports no package."""
    for requirement in package_ranges():
        name, installed = requirement.name, installed_version(requirement.name)
        if installed is not None and not requirement.specifier.contains(installed, prereleases=True):
            yield (
                f"{name} {installed} is installed, and nemo_like was tested with "
                f"{name}{requirement.specifier}; docs/reference/dependencies.md says what may break"
            )
