"""The examples for KubeRay and SkyPilot are well formed, and their commands are runs."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import run_grpo
from nemo_like.configuration import load_config

ROOT = Path(__file__).parents[2]
PINNED_RAY = dict(
    line.split("==") for line in (ROOT / "requirements/gpu.txt").read_text().splitlines() if "==" in line
)["ray"]


def read(path: str) -> dict[str, Any]:
    content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
    assert isinstance(content, dict)
    return content


def arguments_in(shell: str) -> list[str]:
    """Return the arguments of run_grpo.py in a script, which bash can read."""
    checked = subprocess.run(["bash", "-n", "-c", shell], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    (line,) = re.findall(r"python run_grpo\.py (.*)", shell.replace("\\\n", " "))
    return shlex.split(line)


@pytest.fixture
def job() -> dict[str, Any]:
    return read("scripts/kuberay/rayjob.yaml")


@pytest.fixture
def task() -> dict[str, Any]:
    return read("scripts/skypilot/run.yaml")


def test_the_entry_points_would_run(job: dict[str, Any], task: dict[str, Any]) -> None:
    for shell in (job["spec"]["entrypoint"], task["run"]):
        assert run_grpo.main([*arguments_in(shell), "--dry-run"]) == 0


def test_the_pods_have_the_gpus_that_the_configuration_asks_for(job: dict[str, Any]) -> None:
    spec = job["spec"]["rayClusterSpec"]
    head, (workers,) = spec["headGroupSpec"], spec["workerGroupSpecs"]
    arguments = arguments_in(job["spec"]["entrypoint"])
    cluster = load_config(arguments[1], arguments[2:]).cluster
    assert workers["replicas"] == workers["minReplicas"] == workers["maxReplicas"] == cluster.num_nodes - 1
    for group in (head, workers):
        (container,) = group["template"]["spec"]["containers"]
        assert int(group["rayStartParams"]["num-gpus"]) == cluster.gpus_per_node
        assert int(container["resources"]["limits"]["nvidia.com/gpu"]) == cluster.gpus_per_node
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")


def test_every_volume_that_a_pod_mounts_is_there(job: dict[str, Any]) -> None:
    pod = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    mounted = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_ray_is_the_version_that_is_pinned(job: dict[str, Any]) -> None:
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == PINNED_RAY


def test_what_a_job_sets_for_itself_is_yaml_too(job: dict[str, Any]) -> None:
    assert int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > 60


def test_the_rented_machines_are_those_of_the_configuration(task: dict[str, Any]) -> None:
    arguments = arguments_in(task["run"])
    cluster = load_config(arguments[1], arguments[2:]).cluster
    assert task["num_nodes"] == cluster.num_nodes
    assert task["resources"]["accelerators"] == f"H100:{cluster.gpus_per_node}"
    assert "~/sky_templates/ray/start_cluster" in task["run"]
    assert task["setup"] == "bash scripts/setup.sh --gpu"
