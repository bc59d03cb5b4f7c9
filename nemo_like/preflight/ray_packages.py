"""Says when Ray could not start because its agent cannot be loaded; Ray itself would only wait."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import requires

from packaging.requirements import Requirement

from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.observability.software import installed_version

# The module of OpenTelemetry that Ray's agent imports, and the packages that contain it.
_IMPORTED = "opentelemetry.exporter.prometheus"
_PACKAGES = ("opentelemetry-exporter-prometheus", "opentelemetry-sdk")


def unloadable_ray_packages(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when a private Ray would not start with the installed OpenTelemetry.

    Ray works without a module that is missing. A module that is installed but fails ends Ray's agent, and so
    Ray.
    """
    if cfg.cluster.address is not None:
        return
    try:
        importlib.import_module(_IMPORTED)
    except ModuleNotFoundError:
        return
    except Exception as error:
        unmet = [*_unmet_requirements()]
        found = "; ".join(
            f"{package} needs {needed}, and {version} is installed" for package, needed, version in unmet
        )
        wanted = " ".join(f"'{needed}'" for _, needed, _ in unmet)
        yield Problem(
            key="",
            rule=f"Ray would not start: its agent imports {_IMPORTED}, which fails "
            f"({type(error).__name__}: {error}){': ' * bool(found)}{found}",
            remedy=f"pip install {wanted or 'the versions of requirements/'}; a package that needs another "
            "version gets an environment of its own",
        )


def _unmet_requirements() -> Iterator[tuple[str, Requirement, str | None]]:
    """Yield each requirement of Ray's packages that is not met.

    Yields the package with its version, the requirement, and the version that is installed instead.
    """
    for package in _PACKAGES:
        for line in requires(package) or ():
            needed = Requirement(line)
            if needed.marker is not None and not needed.marker.evaluate({"extra": ""}):
                continue
            version = installed_version(needed.name)
            if version is None or not needed.specifier.contains(version, prereleases=True):
                yield f"{package} {installed_version(package)}", needed, version
