from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config
from nemo_like.observability.software import installed_version
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight import ray_packages
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.ray_packages import unloadable_ray_packages

MODULE = "opentelemetry.exporter.prometheus"


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception, str | None], None]:
    """``failing(error, "1.30.0")``: importing the exporter raises the error, as beside that SDK."""
    load = importlib.import_module

    def fail(error: Exception, sdk: str | None) -> None:
        def imported(name: str) -> object:
            if name == MODULE:
                raise error
            return load(name)

        def version(name: str) -> str | None:
            return sdk if name == "opentelemetry-sdk" else installed_version(name)

        monkeypatch.setattr(ray_packages.importlib, "import_module", imported)
        monkeypatch.setattr(ray_packages, "installed_version", version)

    return fail


def test_what_is_installed_here_can_be_loaded(demo: Callable[..., Config]) -> None:
    assert [*unloadable_ray_packages(demo())] == []
    # It is there to be loaded: else there would be nothing to find.
    assert importlib.import_module(MODULE) is not None


def test_an_sdk_of_another_version_is_named_before_anything_starts(
    demo: Callable[..., Config], failing: Callable[[Exception, str | None], None]
) -> None:
    failing(ImportError("cannot import name 'CardinalityLimits'"), "1.30.0")
    with pytest.raises(ConfigError) as caught:
        preflight(demo(), Machine.this, lambda line: None)
    message = str(caught.value)
    exporter = installed_version("opentelemetry-exporter-prometheus")
    assert "Ray would not start" in message and "cannot import name 'CardinalityLimits'" in message
    assert f"opentelemetry-exporter-prometheus {exporter} needs opentelemetry-sdk~=" in message
    assert "and 1.30.0 is installed" in message
    assert "pip install 'opentelemetry-sdk~=" in message


def test_a_failure_that_no_version_explains_points_to_the_tested_ones(
    demo: Callable[..., Config], failing: Callable[[Exception, str | None], None]
) -> None:
    failing(TypeError("descriptors cannot be created directly"), installed_version("opentelemetry-sdk"))
    (problem,) = unloadable_ray_packages(demo())
    assert problem.rule.endswith("(TypeError: descriptors cannot be created directly)")
    assert "requirements/" in problem.remedy


def test_ray_starts_without_a_module_that_is_not_there(
    demo: Callable[..., Config], failing: Callable[[Exception, str | None], None]
) -> None:
    failing(ModuleNotFoundError("No module named 'opentelemetry'"), None)
    assert [*unloadable_ray_packages(demo())] == []


def test_a_ray_that_runs_already_is_not_looked_at(
    demo: Callable[..., Config], failing: Callable[[Exception, str | None], None]
) -> None:
    failing(ImportError("cannot import name 'CardinalityLimits'"), "1.30.0")
    assert [*unloadable_ray_packages(demo("cluster.address=127.0.0.1:6379"))] == []
