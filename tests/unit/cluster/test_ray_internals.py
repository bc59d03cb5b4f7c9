"""What of Ray's private parts would be missed in silence: a run without it only takes more."""

from __future__ import annotations

import contextlib
import inspect
import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray
from ray import _raylet
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._private.runtime_env.context import RuntimeEnvContext

from nemo_like.cluster import private_ray, runtime
from nemo_like.compat import absent_agent

RAY = Path(ray.__file__).parent
# Settings of Ray's C++ part are called so in its binaries, without "RAY_".
COMPILED = ("prestart_worker_first_driver", "worker_niceness", "task_events_report_interval_ms")
NODE = "0f" * 28  # an id
READ_BY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "_private/accelerators/accelerator.py",
    "RAY_IGNORE_UNHANDLED_ERRORS": "_private/worker.py",
}


@pytest.mark.parametrize("name", COMPILED)
def test_ray_knows_the_settings_of_its_compiled_part(name: str) -> None:
    assert f'"RAY_{name}"' in "".join(
        Path(str(module.__file__)).read_text() for module in (private_ray, runtime)
    )
    with (
        open(RAY / "_raylet.so", "rb") as binary,
        mmap.mmap(binary.fileno(), 0, access=mmap.ACCESS_READ) as content,
    ):
        assert content.find(name.encode()) > 0


@pytest.mark.parametrize("name", READ_BY)
def test_ray_reads_the_variables_of_its_python_part(name: str) -> None:
    assert f'"{name}"' in Path(str(runtime.__file__)).read_text()
    assert name in (RAY / READ_BY[name]).read_text()


def test_ray_calls_the_setup_hook_that_a_process_has_in_its_environment() -> None:
    assert "WORKER_PROCESS_SETUP_HOOK_ENV_VAR" in (RAY / "_private/workers/default_worker.py").read_text()
    assert ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR.isidentifier()


@pytest.mark.parametrize("name", ["start_api_server", "start_monitor", "start_log_monitor"])
def test_ray_starts_needless_processes_by_methods_that_can_be_replaced(name: str) -> None:
    assert callable(getattr(Node, name))


def test_rays_agents_look_for_the_dashboard_where_they_are_told_of_none() -> None:
    agent = (RAY / "dashboard/modules/event/event_agent.py").read_text()
    assert "ray_constants.DASHBOARD_ADDRESS" in agent
    assert "ray_constants.KV_NAMESPACE_DASHBOARD" in agent


def test_a_raylet_is_told_how_to_start_the_agent_of_the_dashboard() -> None:
    starting = inspect.getsource(services.start_raylet)
    assert 'os.path.join(RAY_PATH, "dashboard", "agent.py")' in starting
    assert '"--dashboard_agent_command={}"' in starting


def test_a_raylet_is_told_how_to_start_workers() -> None:
    assert '"--python_worker_command=' in inspect.getsource(services.start_raylet).replace('f"', '"')
    assert (RAY / "_private/workers/setup_worker.py").is_file()
    options = (RAY / "_private/workers/setup_worker.py").read_text()
    assert '"--serialized-runtime-env-context"' in options and '"--language"' in options
    assert callable(RuntimeEnvContext.exec_worker)
    assert {"command_prefix", "env_vars", "py_executable", "override_worker_entrypoint"} <= {
        *inspect.signature(RuntimeEnvContext).parameters
    }


@pytest.mark.parametrize(
    "name", ["DASHBOARD_AGENT_LISTEN_PORT_NAME", "METRICS_AGENT_PORT_NAME", "METRICS_EXPORT_PORT_NAME"]
)
def test_the_stand_in_for_the_agent_says_of_each_of_its_ports_that_it_is_not_in_use(
    tmp_path: Path, name: str
) -> None:
    """As Ray's own does where packages for its services are missing."""
    arguments = [f"--session-dir={tmp_path}", f"--node-id={NODE}", "--minimal"]
    command = [sys.executable, str(absent_agent.__file__), *arguments]
    with subprocess.Popen(command, env={"RAY_RAYLET_PID": str(os.getpid())}) as agent:
        try:
            port = _raylet.wait_for_persisted_port(str(tmp_path), NODE, getattr(_raylet, name), 30_000)
        finally:
            agent.kill()
    assert port == -1


def test_the_stand_in_for_the_agent_ends_when_the_raylet_has(tmp_path: Path) -> None:
    command = f"{sys.executable} {absent_agent.__file__} --session-dir={tmp_path} --node-id={NODE}"
    # The shell has the raylet's place.
    script = f"RAY_RAYLET_PID=$$ {command} & echo $!; sleep 1"
    started = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(int(started.stdout)).wait(timeout=30)
