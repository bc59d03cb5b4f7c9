from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.cluster.fork_server import ForkServer, Imports
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from nemo_like.generation.environment import CPU_IMPORTS, engine_environment, unused_by_engines
from nemo_like.policy.options import Device
from tests.functional.runs import DEMO_STEPS, ROOT, FinishedRun, run_grpo
from tests.functional.validated_run import validated_run, write_problems
from tests.functional.warm_servers import PATH, cold, shared

SHAPES = ".cache/data/shapes"
CHAT_TEMPLATE = "tests/functional/chat_template.jinja"
# What is watched changes no result; nor does the template, since problems are plain text.
OBSERVED = [
    *("logger.trace_steps=[2]", "logger.profile.steps=[2]"),
    *("logger.profile.processes=[policy_worker-1]", "logger.tensorboard.enabled=true"),
    f"data.chat_template={CHAT_TEMPLATE}",
]


@pytest.fixture(scope="session", autouse=True)
def forked_checks() -> Iterator[None]:
    """Have checks that a test calls in its own process be forks, as those of its runs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PATH)  # where a check's process looks for modules
        yield


@pytest.fixture(scope="session")
def arithmetic_model() -> str:
    """The demo's checkpoint for seed 1, made on first use and kept like the demo's own."""
    return prepared(".cache/models/arithmetic-d2-s1")


@pytest.fixture(scope="session")
def mixture_model() -> str:
    """The same task's mixture of experts, likewise."""
    return prepared(".cache/models/arithmetic-moe-d2-s1", "--experts", "8")


@pytest.fixture(scope="session")
def arithmetic_teacher() -> str:
    """A larger model that can add, from which the demo's learns by distillation; likewise."""
    options = ("--hidden-size", "192", "--accuracy", "0.97")
    return prepared(".cache/models/arithmetic-teacher-d2-s1", *options)


@pytest.fixture(scope="session")
def sums_model() -> str:
    """The checkpoint of the demo with an agent, and its problems, likewise."""
    path = ".cache/models/sums-s4"  # the demo's seed
    prepare("prepare_sums.py", "--output", path, "--data", ".cache/data/sums", "--seed", "4")
    return str(ROOT / path)


@pytest.fixture(scope="session")
def shapes_model() -> str:
    """The checkpoint of the demo with pictures, and its pictures, likewise."""
    path = ".cache/models/shapes-s1"
    prepare("prepare_shapes.py", "--output", path, "--data", SHAPES, "--seed", "1")
    return path


def prepared(path: str, *options: str) -> str:
    prepare("prepare_arithmetic.py", "--output", path, "--seed", "1", *options)
    return path


def prepare(script: str, *options: str) -> None:
    command = [sys.executable, f"scripts/{script}", *options]
    subprocess.run(command, cwd=ROOT, check=True, timeout=550, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def demo(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """The demo's configuration as it is, over its first steps, with step 2 traced and profiled."""
    with cold():
        run = run_grpo(tmp_path_factory.mktemp("demo"), [f"grpo.max_num_steps={DEMO_STEPS}", *OBSERVED])
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="session")
def problems(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of problems, some of which are too long."""
    path = tmp_path_factory.mktemp("data") / "problems.jsonl"
    write_problems(path)
    return path


@pytest.fixture(scope="session")
def validated(arithmetic_model: str, problems: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """A run that ended when a held-out set reached its goal."""
    run = validated_run(tmp_path_factory.mktemp("validated"), problems)
    assert run.returncode == 0, run.output
    return run


# As many logical CPUs as a few data planes ask for.
_NEEDS = RayNeeds(address=None, num_cpus=16, num_gpus=0, start_timeout_s=120)


@pytest.fixture(scope="module")
def private_ray() -> Iterator[None]:
    """Ray in this process."""
    with ray_runtime(_NEEDS, warn=print):
        yield


@pytest.fixture(scope="module")
def ray_of_engines() -> Iterator[None]:
    """Ray in this process, which forks processes that have the environment of engines on CPUs."""
    imports = Imports(CPU_IMPORTS, unused_by_engines(Device.cpu))
    server = ForkServer([imports], engine_environment(Device.cpu))
    with shared(), ray_runtime(replace(_NEEDS, fork_server=server), warn=print):
        yield


@pytest.fixture(scope="module")
def nobody_dies() -> Iterator[None]:
    """Put an error down to a death only where that follows at once.

    Where errors have other causes, a module that uses this does not wait ten seconds with each of them.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_like.cluster.cluster._CAUSE_GRACE_S", 1.0)
        yield
