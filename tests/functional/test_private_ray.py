"""A Ray that gives up while it starts, or dies later, and signals that arrive meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from nemo_like.cluster import gcs_watch
from nemo_like.cluster.actor_errors import ActorDied, ClusterError, RayDied
from nemo_like.cluster.actors import ActorSpec
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.janitor import MARK, clean_up
from nemo_like.cluster.runtime import RayNeeds, free_port, ray_runtime
from nemo_like.driver.stopping import sigterm_as_interrupt
from tests.functional.runs import ROOT

# How long Ray waits for the process that it starts first.
RAYS_PATIENCE = "RAY_gcs_server_port_wait_time_s"
SLEEPER = "tests.functional.sleeper:Sleeper"
NO_PATIENCE = "-1"  # with 0 Ray looks once, and on a busy machine may find what it waits for


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where Ray makes its directory, and pytest does not: ``tmp_path`` is there already. A short path, since
    sockets are in it."""
    with tempfile.TemporaryDirectory(prefix="rays-", dir="/tmp") as path:
        monkeypatch.setattr(tempfile, "tempdir", path)
        yield Path(path)
        assert list(Path(path).iterdir()) == []
        assert not [one.pid for one in psutil.process_iter() if path in _mark(one)]


def _mark(process: psutil.Process) -> str:
    try:
        return process.environ().get(MARK, "")
    except psutil.Error:
        return ""


def needs(timeout_s: float, **options: object) -> RayNeeds:
    values = {"address": None, "num_cpus": 1, "num_gpus": 0, "start_timeout_s": timeout_s}
    return RayNeeds(**{**values, **options})


class Reader:
    """Reads files in its own process."""

    def first_line(self, path: str) -> str:
        return Path(path).read_text(encoding="utf-8").splitlines()[0]


@pytest.mark.timeout(300)
def test_ray_is_started_again_when_it_gave_up_before_the_deadline(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAYS_PATIENCE, NO_PATIENCE)
    warnings = []

    def warn(message: str) -> None:
        warnings.append(message)
        monkeypatch.setenv(RAYS_PATIENCE, "120")

    with ray_runtime(needs(240), warn):
        assert ray.is_initialized()
        assert len(list(home.iterdir())) == 1
    assert len(warnings) == 1
    assert warnings[0].startswith("Ray did not start: ")
    assert warnings[0].endswith("; trying again")


@pytest.mark.timeout(300)
def test_a_ray_that_does_not_start_in_time_is_an_error_that_names_the_key(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAYS_PATIENCE, NO_PATIENCE)
    with (
        pytest.raises(ClusterError, match=r"Ray did not start: .+cluster\.start_timeout_s=0\.01"),
        ray_runtime(needs(0.01), pytest.fail),
    ):
        pass
    assert not ray.is_initialized()


@pytest.mark.timeout(300)
def test_what_cannot_start_at_all_is_not_tried_until_the_deadline(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RAYS_PATIENCE, NO_PATIENCE)
    warnings: list[str] = []
    with pytest.raises(ClusterError, match="Ray did not start"), ray_runtime(needs(1e6), warnings.append):
        pass
    assert len(warnings) == 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_ray_at_the_address_is_an_error_that_says_how_to_start_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(RAYS_PATIENCE, "1")
    with (
        pytest.raises(ClusterError, match=r"cluster\.address=127\.0\.0\.1:9: no Ray .+`ray start`"),
        ray_runtime(needs(60, address="127.0.0.1:9"), pytest.fail),
    ):
        pass


@pytest.mark.timeout(300)
def test_a_sigterm_while_ray_starts_interrupts(home: Path) -> None:
    """It arrives once Ray's first process runs, and Ray waits for it."""

    def terminate_me_when_ray_has_begun() -> None:
        while not any(home.glob("ray*/session_*/logs/gcs_server.out")):
            threading.Event().wait(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    killer = threading.Thread(target=terminate_me_when_ray_has_begun)
    killer.start()
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), ray_runtime(needs(60), pytest.fail):
        pytest.fail("the signal was lost")
    killer.join()


@pytest.mark.timeout(300)
def test_a_ctrl_c_while_ray_ends_interrupts_when_it_has_ended(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutdown = ray.shutdown

    def interrupted_shutdown() -> None:
        if ray.is_initialized():
            signal.raise_signal(signal.SIGINT)
        shutdown()

    monkeypatch.setattr(ray, "shutdown", interrupted_shutdown)
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), ray_runtime(needs(60), pytest.fail):
            pass
    finally:
        signal.signal(signal.SIGINT, previous)
    assert not ray.is_initialized()


@pytest.mark.timeout(300)
def test_a_sigterm_while_rays_processes_end_interrupts_when_they_have_ended() -> None:
    program = """
import signal, sys
from ray._private.node import Node
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from nemo_like.driver.stopping import sigterm_as_interrupt
kill_all_processes = Node.kill_all_processes
def terminated(*args, **kwargs):
    signal.raise_signal(signal.SIGTERM)
    kill_all_processes(*args, **kwargs)
Node.kill_all_processes = terminated
try:
    with sigterm_as_interrupt():
        with ray_runtime(RayNeeds(address=None, num_cpus=1, num_gpus=0, start_timeout_s=60), print):
            pass
except KeyboardInterrupt:
    sys.exit(130)
"""
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, timeout=120).returncode == 130


@pytest.mark.timeout(300)
def test_logs_of_a_ray_under_which_something_failed_are_kept(home: Path, tmp_path: Path) -> None:
    with pytest.raises(ClusterError), ray_runtime(needs(60, logs_path=tmp_path / "ray"), pytest.fail):
        raise ClusterError("a stage failed")
    assert (tmp_path / "ray" / "gcs_server.out").is_file()


def process_of_ray(name: str) -> psutil.Process:
    return next(one for one in psutil.Process().children() if one.name() == name)


def control_process_of_a_ray_in_use() -> psutil.Process:
    """Return it once an actor has answered: a thread that Ray starts with itself asks the control process
    for something, and cannot be ended before it has the answer."""
    cluster = Cluster()
    sleeper = cluster.start(ActorSpec("sleeper", SLEEPER))
    cluster.gather([sleeper.process_id()], stage="start", timeout_s=60)
    cluster.stop()
    return process_of_ray("gcs_server")


@pytest.mark.timeout(300)
def test_a_wait_ends_when_gcs_server_or_raylet_died_and_another_ray_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One Ray after the other; the next test starts one after the last has lost its raylet."""
    monkeypatch.setenv("RAY_health_check_period_ms", "300")
    for name, error, message, within_s in (
        ("gcs_server", RayDied, r"gcs_server\) died during stage 'sleep'", 30),
        # Ray itself notices after five missed heartbeats, which are three seconds apart by default.
        ("raylet", ActorDied, "actor 'sleeper' died during stage 'sleep'", 90),
    ):
        with ray_runtime(needs(60), pytest.fail) as ray_failure:
            cluster = Cluster(ray_failure=ray_failure)
            sleeper = cluster.start(ActorSpec("sleeper", SLEEPER))
            cluster.gather([sleeper.process_id()], stage="start", timeout_s=60)
            process_of_ray(name).kill()
            with pytest.raises(error, match=message):
                cluster.gather([sleeper.submit("sleep", 100)], stage="sleep", timeout_s=within_s)
            cluster.stop()


@pytest.mark.timeout(300)
def test_a_control_process_that_is_stopped_for_long_counts_as_dead(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_watch, "_STOPPED_S", 0.5)
    with ray_runtime(needs(60), pytest.fail) as ray_failure:
        control_process_of_a_ray_in_use().suspend()
        while ray_failure() is None:
            threading.Event().wait(0.05)
    assert ray_failure() is None  # it is none of this Ray's any more


@pytest.mark.timeout(300)
def test_a_control_process_that_is_stopped_does_not_keep_ray_from_its_end(home: Path) -> None:
    with ray_runtime(needs(60), pytest.fail):
        process = control_process_of_a_ray_in_use()
        process.suspend()
        while process.status() != psutil.STATUS_STOPPED:
            threading.Event().wait(0.01)


@pytest.fixture(scope="module")
def deaf_driver(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A driver that loses Ray's control process while it asks Ray for something, and its home."""
    program = """
import psutil, ray
from nemo_like.cluster import gcs_watch
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
gcs_watch._UNHEARD_S = 2
with ray_runtime(RayNeeds(address=None, num_cpus=1, num_gpus=0, start_timeout_s=60), print):
    next(one for one in psutil.Process().children() if one.name() == "gcs_server").kill()
    ray.nodes()
"""
    unset = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "PYTHONUNBUFFERED")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    home = tmp_path_factory.mktemp("home")
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**environment, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return ended, home


@pytest.mark.timeout(300)
def test_nobody_else_may_read_the_token_that_ray_makes(
    deaf_driver: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, home = deaf_driver
    assert (home / ".ray" / "auth_token").stat().st_mode & 0o777 == 0o600


@pytest.mark.timeout(300)
def test_a_driver_that_cannot_hear_of_it_says_why_it_ends(
    deaf_driver: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    ended, _ = deaf_driver
    assert ended.returncode == 1
    assert ended.stdout.splitlines()[-1] == "Ray's control process (gcs_server) died"


@pytest.mark.timeout(300)
def test_relative_paths_are_the_drivers_on_a_ray_that_was_started_elsewhere(
    home: Path, tmp_path: Path
) -> None:
    address, directory = f"127.0.0.1:{free_port()}", home / "elsewhere"
    start = ["ray", "start", "--head", f"--port={address.split(':')[1]}", "--node-ip-address=127.0.0.1"]
    start += ["--num-cpus=1", "--num-gpus=0", "--include-dashboard=false", f"--temp-dir={directory}"]
    # A token of this user's would be asked for, which this process has if it had a Ray of its own before.
    auth_mode = os.environ.get("RAY_AUTH_MODE", "disabled")
    environment = {**os.environ, MARK: str(directory), "SPT_NOENV": "1", "RAY_AUTH_MODE": auth_mode}
    try:
        subprocess.run(start, cwd=tmp_path, env=environment, check=True, timeout=120, capture_output=True)
        with ray_runtime(needs(60, address=address), pytest.fail):
            cluster = Cluster()
            reader = cluster.start(ActorSpec("reader", f"{__name__}:Reader"))
            (line,) = cluster.gather([reader.submit("first_line", "README.md")], stage="read", timeout_s=60)
            cluster.stop()
        assert line == "# nemo_like"
    finally:
        clean_up(directory)
