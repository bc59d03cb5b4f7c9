"""A private Slurm on this machine: its own configuration, ports, state and munge; nodes of one machine."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.cluster.runtime import free_port
from tests.functional.runs import MARK, ROOT, wait_until_gone

# Programs by the package of Debian and Ubuntu in which they are.
NEEDED = {
    "munge": ("munged",),
    "slurmctld": ("slurmctld",),
    "slurmd": ("slurmd",),
    "slurm-client": ("sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo"),
}
SBIN = "/usr/sbin:/usr/local/sbin"  # where a user's PATH does not look, and the daemons are
START_TIMEOUT_S = 30


@dataclass(frozen=True)
class Slurm:
    """How to talk to it; its processes and those of its jobs carry ``mark``."""

    environment: Mapping[str, str]
    mark: str

    def run(
        self, *command: str, timeout_s: float = 60, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        """A command of Slurm, or one that uses it, from the repository."""
        return subprocess.run(
            command,
            cwd=ROOT,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol says of a job."""
        text = self.run("scontrol", "show", "job", job_id, "--oneliner").stdout
        return dict(field.partition("=")[::2] for field in text.split() if "=" in field)


def missing() -> str:
    """Names of the packages that are not installed."""
    path = f"{os.environ['PATH']}:{SBIN}"
    return ", ".join(
        package
        for package, programs in NEEDED.items()
        if any(shutil.which(program, path=path) is None for program in programs)
    )


@contextmanager
def private_slurm(num_nodes: int, jobs_per_node: int = 1) -> Iterator[Slurm]:
    """Up while the block runs; its daemons are gone afterwards."""
    mark = uuid.uuid4().hex
    # Not pytest's directory: the path of munge's socket may be at most 107 bytes long.
    with tempfile.TemporaryDirectory(prefix="slurm-") as name, ExitStack() as daemons:
        daemons.callback(_check_all_are_gone, mark)  # before their files are
        directory = Path(name)
        directory.chmod(0o755)
        for inner in ("state", "log", *(f"spool-node{i + 1}" for i in range(num_nodes))):
            (directory / inner).mkdir()
        key = directory / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        conf = directory / "slurm.conf"
        conf.write_text(_configuration(directory, num_nodes, jobs_per_node))
        environment = {
            **os.environ,
            "PATH": f"{os.environ['PATH']}:{SBIN}",
            "SLURM_CONF": str(conf),
            MARK: mark,
        }

        def start(*command: str) -> None:
            log = (directory / "log" / f"{command[0]}-{uuid.uuid4().hex[:4]}").open("w")
            daemon = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            daemons.callback(_end, daemon)
            daemons.callback(log.close)

        files = {"pid-file": "munge.pid", "log-file": "munge.log", "seed-file": "munge.seed"}
        munge_files = [f"--{option}={directory / file}" for option, file in files.items()]
        socket_path = directory / "munge.socket"
        start(
            "munged", "--foreground", "--force", f"--socket={socket_path}", f"--key-file={key}", *munge_files
        )
        _wait_for(socket_path.exists, "munged", directory)
        start("slurmctld", "-D", "-f", str(conf))
        for index in range(num_nodes):
            start("slurmd", "-D", "-N", f"node{index + 1}", "-f", str(conf))
        slurm = Slurm(environment, mark)
        idle = f"node[1-{num_nodes}] idle"
        _wait_for(lambda: idle in slurm.run("sinfo", "-h", "-o", "%N %T").stdout, "Slurm", directory)
        yield slurm
        slurm.run("scancel", "--full", f"--user={getpass.getuser()}")


def _check_all_are_gone(mark: str) -> None:
    assert wait_until_gone(mark) == []


def _configuration(directory: Path, num_nodes: int, jobs_per_node: int) -> str:
    host, user = socket.gethostname().partition(".")[0], getpass.getuser()
    lines = [
        "ClusterName=test",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmctldPort={free_port()}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired.
        f"AuthInfo=socket={directory}/munge.socket,cred_expire=5",
        "CredType=cred/munge",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool-%n",
        f"SlurmctldPidFile={directory}/slurmctld.pid",
        f"SlurmdPidFile={directory}/slurmd-%n.pid",
        "ProctrackType=proctrack/pgid",
        "TaskPlugin=task/none",
        "MpiDefault=none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_Core",
        "JobAcctGatherType=jobacct_gather/none",
        "SchedulerType=sched/builtin",
        "SchedulerParameters=sched_interval=2",
        "ReturnToService=2",
        "SlurmdParameters=config_overrides",  # a node's CPUs are those written here
        "KillWait=5",
    ]
    lines += [
        f"NodeName=node{i + 1} NodeHostname={host} NodeAddr=127.0.0.{i + 1} Port={free_port()} "
        f"CPUs={jobs_per_node}"
        for i in range(num_nodes)
    ]
    return "\n".join([*lines, "PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]) + "\n"


def _wait_for(is_ready: object, what: str, directory: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not is_ready():  # type: ignore[operator]
        if time.monotonic() > deadline:
            logs = "\n".join(f"{log.name}:\n{log.read_text()}" for log in (directory / "log").iterdir())
            pytest.fail(f"{what} did not start within {START_TIMEOUT_S} s\n{logs}")
        time.sleep(0.1)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=20)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait(timeout=20)
