from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier

import pytest

from nemo_like.observability.run_lock import LEASE_S, DirectoryInUse, DirectoryLock, RunStart, latest_start

HOLDER = """
import sys
from pathlib import Path
from nemo_like.observability.run_lock import DirectoryLock
lock = DirectoryLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
lock.release()
"""


@contextmanager
def holder(directory):
    """Another process that holds the directory until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=30)


def start_file(directory, number):
    return directory / "starts" / f"{number}.json"


def rewrite(directory, number, *, silent_s=0.0, **values):
    """Have a start say something else about itself, and be silent for so long."""
    path = start_file(directory, number)
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))
    quiet_since = path.stat().st_mtime - silent_s
    os.utime(path, (quiet_since, quiet_since))


def test_a_second_process_is_refused_and_told_who_holds_the_directory(tmp_path):
    with holder(tmp_path) as process:
        with pytest.raises(DirectoryInUse) as refused:
            DirectoryLock(tmp_path)
        assert f"{tmp_path} is in use: process {process.pid} on host {os.uname().nodename}" in str(
            refused.value
        )
        assert "and is running" in str(refused.value)
        assert "another logger.run_name" in str(refused.value)


def test_a_run_that_ended_leaves_its_directory_free(tmp_path):
    with holder(tmp_path) as process:
        process.communicate(timeout=30)
    assert json.loads(start_file(tmp_path, 1).read_text())["ended"] is not None
    DirectoryLock(tmp_path)
    assert start_file(tmp_path, 2).is_file()


def test_the_directory_of_a_killed_process_is_free_at_once(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait(timeout=30)
        DirectoryLock(tmp_path)


def test_a_killed_process_that_its_parent_has_not_waited_for_holds_nothing(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is dead, and stays a corpse
        DirectoryLock(tmp_path)


def test_a_stopped_process_on_this_machine_holds_its_directory_however_long_it_is_silent(tmp_path):
    with holder(tmp_path):
        rewrite(tmp_path, 1, silent_s=10 * LEASE_S)
        with pytest.raises(DirectoryInUse, match="and is running"):
            DirectoryLock(tmp_path)


def test_another_process_that_got_the_same_id_is_not_taken_for_the_holder(tmp_path):
    with holder(tmp_path) as process:
        began = json.loads(start_file(tmp_path, 1).read_text())["process_began"]
        rewrite(tmp_path, 1, process_began=began - 1)
        DirectoryLock(tmp_path)
        assert process.poll() is None


@pytest.mark.parametrize(
    "elsewhere",
    [
        pytest.param({"host": "node7"}, id="another host"),
        pytest.param({"pid_namespace": "pid:[4026532000]"}, id="a container with this host's name"),
        pytest.param({"pid_namespace": None}, id="a container without a process table of its own"),
        pytest.param({"boot_id": "0"}, id="a machine with this host's name"),
    ],
)
def test_a_process_elsewhere_holds_its_directory_until_it_has_been_silent_for_the_lease(tmp_path, elsewhere):
    DirectoryLock(tmp_path)
    # No process here has this id, which says nothing about processes elsewhere.
    rewrite(tmp_path, 1, silent_s=LEASE_S - 5, pid=2**22 + 1, **elsewhere)
    with pytest.raises(DirectoryInUse, match="gave a sign of life 55 s ago"):
        DirectoryLock(tmp_path)
    rewrite(tmp_path, 1, silent_s=LEASE_S + 5)
    DirectoryLock(tmp_path)


@pytest.mark.parametrize(
    ("environment", "is_free"),
    [
        ({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1"}, True),
        ({"SLURM_JOB_ID": "42"}, False),  # a second start inside the job
        ({"SLURM_JOB_ID": "43", "SLURM_RESTART_COUNT": "1"}, False),
        ({"SLURM_JOB_ID": "42", "SLURM_RESTART_COUNT": "1", "SLURM_CLUSTER_NAME": "other"}, False),
        ({}, False),
    ],
)
def test_a_job_that_slurm_has_queued_again_gets_its_directory_at_once(
    tmp_path, monkeypatch, environment, is_free
):
    for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_CLUSTER_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    DirectoryLock(tmp_path)
    rewrite(tmp_path, 1, host="node7")
    monkeypatch.delenv("SLURM_JOB_ID")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if is_free:
        DirectoryLock(tmp_path)
    else:
        with pytest.raises(DirectoryInUse, match=r"on host node7 \(Slurm job 42\) has held it since"):
            DirectoryLock(tmp_path)


@pytest.mark.parametrize("has_hard_links", [True, False])
def test_of_many_that_find_a_dead_holder_at_once_exactly_one_takes_its_place(
    tmp_path, monkeypatch, has_hard_links
):
    if not has_hard_links:

        def refuse(*_):
            raise PermissionError(errno.EPERM, "no hard links in this file system")

        monkeypatch.setattr(os, "link", refuse)
    num_starts = 8

    def try_to_start(directory, barrier):
        barrier.wait(timeout=30)
        try:
            return DirectoryLock(directory)
        except DirectoryInUse:
            return None

    with ThreadPoolExecutor(num_starts) as pool:
        for attempt in range(20):
            directory = tmp_path / str(attempt)
            DirectoryLock(directory).release()
            barrier = Barrier(num_starts)
            starts = [pool.submit(try_to_start, directory, barrier) for _ in range(num_starts)]
            won = [start.result() for start in starts]
            assert sum(lock is not None for lock in won) == 1


def test_a_start_of_which_nothing_can_be_read_holds_the_directory_for_the_lease(tmp_path):
    start_file(tmp_path, 1).parent.mkdir()
    start_file(tmp_path, 1).touch()
    with pytest.raises(DirectoryInUse, match=r"cannot be read in .*1\.json by whom"):
        DirectoryLock(tmp_path)
    quiet_since = start_file(tmp_path, 1).stat().st_mtime - LEASE_S - 5
    os.utime(start_file(tmp_path, 1), (quiet_since, quiet_since))
    DirectoryLock(tmp_path)


def test_a_holder_gives_signs_of_life_and_learns_that_it_was_replaced(tmp_path):
    lock = DirectoryLock(tmp_path)
    rewrite(tmp_path, 1, silent_s=30)
    before = start_file(tmp_path, 1).stat().st_mtime
    assert lock.renew() is None
    assert start_file(tmp_path, 1).stat().st_mtime > before + 25
    rewrite(tmp_path, 1, host="node7", silent_s=LEASE_S + 5)
    DirectoryLock(tmp_path)
    assert f"process {os.getpid()} on host" in lock.renew()
    assert f"has taken {tmp_path}" in lock.renew()


def test_a_holder_whose_directory_was_removed_learns_of_it(tmp_path):
    lock = DirectoryLock(tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    assert "1.json is gone" in lock.renew()
    lock.release()
    assert not (tmp_path / "run").exists()


def test_nothing_but_the_starts_is_left_in_the_directory(tmp_path):
    DirectoryLock(tmp_path).release()
    DirectoryLock(tmp_path)
    with pytest.raises(DirectoryInUse):
        DirectoryLock(tmp_path)
    assert sorted(path.name for path in (tmp_path / "starts").iterdir()) == ["1.json", "2.json"]


def test_a_process_knows_its_own_start(monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    start = RunStart.of_this_process()
    assert (start.pid, start.slurm_job, start.slurm_restarts) == (os.getpid(), "/7", 0)
    assert not start.is_over(start, silence_s=1e9)


def test_who_only_reads_sees_whether_the_latest_start_goes_on(tmp_path):
    assert latest_start(tmp_path) is None
    with holder(tmp_path) as process:
        start = latest_start(tmp_path)
        assert start.process == f"process {process.pid} on host {os.uname().nodename}"
        assert not start.is_over
        process.kill()
        process.wait()
        start = latest_start(tmp_path)
        assert (start.is_over, start.has_ended) == (True, False)
    lock = DirectoryLock(tmp_path)
    assert latest_start(tmp_path).process.startswith(f"process {os.getpid()} on ")
    lock.release()
    start = latest_start(tmp_path)
    assert (start.is_over, start.has_ended) == (True, True)
    assert sorted(path.name for path in (tmp_path / "starts").iterdir()) == ["1.json", "2.json"]


def test_a_start_on_another_machine_is_over_when_it_is_silent(tmp_path):
    lock = DirectoryLock(tmp_path)
    rewrite(tmp_path, 1, silent_s=LEASE_S - 20, host="elsewhere")
    assert not latest_start(tmp_path).is_over
    rewrite(tmp_path, 1, silent_s=LEASE_S)
    assert latest_start(tmp_path).is_over
    lock.release()


def test_files_that_are_no_starts_are_in_nobodys_way(tmp_path):
    DirectoryLock(tmp_path).release()
    for name in ("1_backup.json", "2 (copy).json", "1.json.orig", "\u00b2.json"):
        shutil.copy(start_file(tmp_path, 1), tmp_path / "starts" / name)
    assert latest_start(tmp_path).has_ended
    lock = DirectoryLock(tmp_path)
    assert start_file(tmp_path, 2).exists()
    lock.release()


@pytest.mark.parametrize(
    "changed",
    [{"pid": "4711"}, {"pid": None}, {"began": "yesterday"}, {"ended": 5}, {"host": None}, {"slurm_job": 7}],
)
def test_a_start_with_other_values_than_a_run_writes_cannot_be_understood(tmp_path, changed):
    DirectoryLock(tmp_path).release()
    rewrite(tmp_path, 1, **changed)
    assert latest_start(tmp_path) is None
    with pytest.raises(DirectoryInUse, match="cannot be read"):
        DirectoryLock(tmp_path)
    rewrite(tmp_path, 1, silent_s=LEASE_S)
    DirectoryLock(tmp_path).release()
