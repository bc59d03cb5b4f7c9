"""What the report says of a run as a whole, by hand-made files of run directories."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.run_lock import RunStart
from nemo_like_tools.report.run_state import evaluated_groups, run_configuration, run_state

BEGAN_S = 1_800_000_000


def moment(seconds: float) -> str:
    return datetime.fromtimestamp(BEGAN_S + seconds, UTC).isoformat()


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


def start(directory: RunDirectory, number: int, began: float, ended: float | None, **changes: Any) -> None:
    """A start of a process that is gone, began and ended so many seconds after ``BEGAN_S``."""
    folder = directory.path / "starts"
    folder.mkdir(exist_ok=True)
    values = {
        "host": "node-7", "boot_id": "b", "pid_namespace": None, "pid": 17, "process_began": 5,
        "slurm_job": None, "slurm_restarts": 0, "began": moment(began),
        "ended": None if ended is None else moment(ended), **changes,
    }  # fmt: skip
    path = folder / f"{number}.json"
    path.write_text(json.dumps(values))
    if ended is None:
        os.utime(path, (BEGAN_S + began + 30, BEGAN_S + began + 30))


def own_process() -> dict[str, Any]:
    """The values by which this process, which runs, is found."""
    names = ("host", "boot_id", "pid_namespace", "pid", "process_began")
    return {name: getattr(RunStart.of_this_process(), name) for name in names}


def events(directory: RunDirectory, *of: tuple[float, str, str, int | None]) -> None:
    lines = [
        {"time": moment(at), "kind": kind, "text": text, "step": None, "exit_code": code}
        for at, kind, text, code in of
    ]
    directory.events_path.write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("code", "status"),
    [(0, "finished"), (1, "failed"), (3, "failed"), (75, "stopped"), (130, "stopped"), (None, "failed")],
)
def test_the_last_word_says_how_the_run_ended(directory: RunDirectory, code: int | None, status: str) -> None:
    start(directory, 1, 0, 100)
    events(directory, (3, "status", "starting Ray", None), (95, "ended", "ended so", code))
    state = run_state(directory)
    assert (state["status"], state["outcome"], state["seconds"]) == (status, "ended so", 95)
    assert state["process"] == "process 17 on host node-7"
    assert (state["began"], state["starts"]) == (BEGAN_S, 1)


def test_a_run_that_is_continued_runs_on_and_has_the_time_of_all_its_starts(directory: RunDirectory) -> None:
    start(directory, 1, 0, 40)
    start(directory, 2, 1000, None, **own_process())
    events(directory, (40, "ended", "was interrupted", 130), (1050, "step", "", None))
    state = run_state(directory)
    # The end of the first start is not that of the run: 40 s, then 50 s up to the latest event.
    assert (state["status"], state["outcome"], state["seconds"]) == ("running", None, 90)
    assert state["starts"] == 2


def test_a_process_that_is_gone_without_a_word_has_died(directory: RunDirectory) -> None:
    own = own_process()
    start(directory, 1, 0, None, **{**own, "process_began": own["process_began"] + 1})
    state = run_state(directory)
    assert (state["status"], state["outcome"], state["seconds"]) == ("died", "left no last word", 30)


def test_what_a_directory_does_not_say_is_unknown(directory: RunDirectory) -> None:
    state = run_state(directory)
    assert state == {
        "status": "unknown", "outcome": None, "began": None, "seconds": None, "starts": 0, "process": None,
        "software": None,
    }  # fmt: skip
    assert run_configuration(directory) is None
    assert evaluated_groups(directory) is None


def test_software_configuration_and_evaluation_are_read(directory: RunDirectory) -> None:
    directory.write_software({"commit": "abc", "has_changes": False, "python": "3.11.2", "packages": {}})
    directory.write_config("grpo: {seed: 3, empty: {}}\ndata: {train: [{name: a}]}\n")
    directory.evaluation_path.write_text('{"groups": [{"by": "all"}]}')
    assert run_state(directory)["software"]["commit"] == "abc"
    assert run_configuration(directory) == {
        "grpo.seed": 3, "grpo.empty": {}, "data.train": [{"name": "a"}]
    }  # fmt: skip
    assert evaluated_groups(directory) == [{"by": "all"}]


@pytest.mark.parametrize("text", ["[", "just a word", "\x00"])
def test_a_damaged_configuration_is_none(directory: RunDirectory, text: str) -> None:
    directory.config_path.write_text(text)
    assert run_configuration(directory) is None
