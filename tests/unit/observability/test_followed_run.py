"""What a watcher sees of a run, by run directories that the run's own logger writes."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from nemo_like.observability.console import PlainConsole
from nemo_like.observability.events import EventKind, EventsFile
from nemo_like.observability.jsonl import MetricsFile
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.run_lock import DirectoryLock, latest_start
from nemo_like.observability.summary import RunSummary
from nemo_like_tools.watch.followed_run import FollowedRun, NoRunDirectory, find_run
from scripts.watch import main
from tests.unit.observability.test_logger import make_logger

STEP = {"train/reward": 0.5, "train/loss": 0.25, "timing/train/total_step_time": 2.0}


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory.create(str(tmp_path / "runs"), "demo")
    directory.write_config("grpo: {max_num_steps: 8}\n")
    return directory


@pytest.fixture
def lock(directory: RunDirectory) -> Iterator[DirectoryLock]:
    """What the process of a run holds; here it is the test's own."""
    lock = DirectoryLock(directory.path)
    yield lock
    lock.release()


def seen(run: FollowedRun) -> list[str]:
    """The lines that an update brings."""
    stream = io.StringIO()
    run.update(PlainConsole(stream, run.progress))
    return stream.getvalue().splitlines()


def killed(directory: RunDirectory) -> None:
    """Have the start say what that of a killed process says: it goes on, with an id that nobody has."""
    path = directory.path / "starts" / "1.json"
    start = json.loads(path.read_text())
    path.write_text(json.dumps({**start, "process_began": start["process_began"] - 1}))


def test_what_is_new_is_told_once_as_the_run_itself_tells_it(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    run = FollowedRun(directory)
    assert run.end is None
    with make_logger(directory, io.StringIO()) as logger:
        logger.status("starting engines")
        assert [line.partition("] ")[2] for line in seen(run)] == ["starting engines"]
        assert run.progress.status == "starting engines"
        logger.log_validation(0, {"validation/accuracy": 0.25})
        logger.flush(0)
        logger.log_step(1, STEP)
        assert seen(run) == ["step 0/8  validation accuracy 0.250"]  # step 1 may get a validation
        logger.flush(1)
        logger.warn("mind the gap")
        assert seen(run) == [
            "step 1/8  reward 0.500  loss 0.2500  step time 2.00 s (other 100%)  eta 0:14",
            "warning: mind the gap",
        ]
        assert seen(run) == []
        assert run.progress.status.endswith(" since step 1")
        logger.finish(RunSummary(outcome="failed: an actor died", exit_code=1))
        assert run.end is None  # the process has not ended yet
    lock.release()
    seen(run)
    assert run.end is not None
    assert (run.end.outcome, run.end.exit_code) == ("failed: an actor died", 1)


def test_who_begins_to_watch_sees_where_the_run_stands(directory: RunDirectory, lock: DirectoryLock) -> None:
    with make_logger(directory, io.StringIO()) as logger:
        for step in (1, 2, 3):
            logger.log_step(step, {**STEP, "train/reward": step / 4})
            logger.flush(step)
        logger.warn("a disk is slow")
        run = FollowedRun(directory)
        assert (run.progress.step, run.progress.rewards) == (3, [0.25, 0.5, 0.75])
        assert run.progress.metrics["train/loss"] == 0.25
        assert run.notes == ("warning: a disk is slow",)
        assert seen(run) == []


def test_the_pace_is_that_of_the_run_and_not_of_the_reading(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    """Steps 1 and 2 of this process ended 30 s apart, so that the six that are left take 180 s."""
    metrics = MetricsFile(directory.metrics_path)
    start = latest_start(directory.path)
    assert start is not None
    began_s = start.began_s
    lines = []
    for step, time_s in ((1, began_s + 10), (2, began_s + 40)):
        metrics.write(step, STEP)
        event = {"time": _moment(time_s), "kind": "step", "text": "", "step": step, "exit_code": None}
        lines.append(json.dumps(event) + "\n")
    metrics.close()
    directory.events_path.write_text("".join(lines))
    run = FollowedRun(directory, clock=lambda: began_s + 52)
    assert run.progress.eta_s == pytest.approx(180.0)
    assert run.progress.elapsed_s == pytest.approx(52.0)
    assert run.progress.status == "0:12 since step 2"


def _moment(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat()


def test_numbers_that_are_not_finite_are_shown(directory: RunDirectory, lock: DirectoryLock) -> None:
    run = FollowedRun(directory)
    with make_logger(directory, io.StringIO()) as logger:
        logger.log_step(1, {"train/reward": 0.5, "train/loss": float("nan")})
        logger.flush(1)
        assert seen(run) == ["step 1/8  reward 0.500  loss nan"]


def test_a_run_that_goes_back_to_a_checkpoint_is_followed(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    with make_logger(directory, io.StringIO()) as logger:
        for step in (1, 2, 3):
            logger.log_step(step, STEP)
            logger.flush(step)
        run = FollowedRun(directory)
        logger.continue_after(1)
        assert seen(run) == []
        assert (run.progress.step, len(run.progress.rewards)) == (1, 1)
        logger.log_step(2, STEP)
        logger.flush(2)
        assert [line.split("  ")[0] for line in seen(run)] == ["step 2/8"]


def test_a_run_of_a_version_without_events_shows_its_steps(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    metrics = MetricsFile(directory.metrics_path)
    for step in (1, 2):
        metrics.write(step, STEP)
    metrics.close()
    run = FollowedRun(directory)
    assert (run.progress.step, run.progress.eta_s, run.progress.status) == (2, 12.0, "")


def test_a_run_that_was_killed_has_died(directory: RunDirectory, lock: DirectoryLock) -> None:
    EventsFile(directory.events_path).write(EventKind.status, "starting Ray")
    killed(directory)
    end = FollowedRun(directory).end
    assert end is not None
    assert end.outcome.startswith("died: process ")
    assert f"left no last word; logs are in {directory.logs_path}" in end.outcome
    assert end.exit_code == 1


def test_the_end_of_an_earlier_start_is_not_that_of_a_later_one(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    early = {"time": _moment(1.0), "kind": "ended", "text": "finished", "step": None, "exit_code": 0}
    directory.events_path.write_text(json.dumps(early) + "\n")
    run = FollowedRun(directory)
    assert run.end is None
    lock.release()
    seen(run)
    assert run.end is not None
    assert run.end.outcome.startswith("ended without a word on how it went")


def test_a_run_whose_clock_was_set_back_is_heard_to_its_end(
    directory: RunDirectory, lock: DirectoryLock
) -> None:
    start = latest_start(directory.path)
    assert start is not None
    run = FollowedRun(directory)
    told = [
        {"time": _moment(start.began_s - 7200), "kind": "ended", "text": "failed", "exit_code": 1},
        {"time": _moment(start.began_s + 5), "kind": "status", "text": "starting Ray", "exit_code": None},
        {"time": _moment(start.began_s - 3600), "kind": "note", "text": "mind the gap", "exit_code": None},
        {"time": _moment(start.began_s - 3590), "kind": "ended", "text": "finished", "exit_code": 0},
    ]
    directory.events_path.write_text("".join(json.dumps({**one, "step": None}) + "\n" for one in told))
    assert [line.partition("] ")[2] or line for line in seen(run)] == ["starting Ray", "mind the gap"]
    lock.release()
    seen(run)
    assert run.end is not None
    assert (run.end.outcome, run.end.exit_code) == ("finished", 0)


def test_a_directory_that_is_none_of_a_run_is_refused(
    directory: RunDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = tmp_path / "slurm-42"
    (job / "nodes").mkdir(parents=True)
    for path, message in (
        (tmp_path / "nowhere", "nowhere is no directory; give the path that a run prints as run_dir"),
        (directory.logs_path, "logs is no run directory, as it has no config.yaml; give the path"),
        (directory.path.parent, f"it has no config.yaml; there are runs in it: {directory.path}"),
        (job, "slurm-42 is of a Slurm job that has not begun its run yet"),
    ):
        with pytest.raises(NoRunDirectory, match=message):
            find_run(path)
    assert main([str(job)]) == 2
    assert "watch: " in capsys.readouterr().err
    directory.write_config("grpo: 3\n")
    with pytest.raises(NoRunDirectory, match=r"config\.yaml has no grpo\.max_num_steps"):
        FollowedRun(directory)


def test_a_directory_that_goes_away_ends_the_watching(directory: RunDirectory, lock: DirectoryLock) -> None:
    run = FollowedRun(directory)
    directory.config_path.unlink()
    with pytest.raises(NoRunDirectory, match="demo is gone"):
        seen(run)


def test_the_run_of_a_slurm_job_is_found(tmp_path: Path) -> None:
    run = RunDirectory.create(str(tmp_path / "slurm-42"), "run")
    run.write_config("grpo: {max_num_steps: 8}\n")
    assert find_run(tmp_path / "slurm-42") == run


def test_the_command_prints_a_run_once(
    directory: RunDirectory, lock: DirectoryLock, capsys: pytest.CaptureFixture[str]
) -> None:
    with make_logger(directory, io.StringIO()) as logger:
        for step in (1, 2):
            logger.log_step(step, STEP)
            logger.flush(step)
        logger.warn("mind the [gap]")
        assert main([str(directory.path), "--once"]) == 0
        shown = capsys.readouterr().out
        assert "warning: mind the [gap]\n" in shown
        assert "step 2/8" in shown
        assert re.search(r"reward +0.500 +▁▁", shown)
        assert "running: process " in shown
        logger.finish(RunSummary(outcome="was stopped: received SIGTERM", exit_code=75))
    lock.release()
    assert main([str(directory.path), "--once"]) == 75
    shown = capsys.readouterr().out
    assert "The run was stopped: received SIGTERM. 2 of 8 steps in 0:0" in shown
    assert shown.endswith(f"run_dir: {directory.path}\n")


def test_lines_that_are_no_metrics_are_passed_over(directory: RunDirectory, lock: DirectoryLock) -> None:
    run = FollowedRun(directory)
    directory.metrics_path.write_bytes(
        b'{"train/reward": 1}\n{"step": 1, "train/reward": "high"}\n\xff\n{"step": 2, "train/reward": 0.5}\n'
    )
    seen(run)
    assert run.progress.step == 2
