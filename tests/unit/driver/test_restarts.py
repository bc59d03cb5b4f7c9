"""When all processes start again, with runs that fail as the test says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.cluster.actor_errors import ActorBroken, ActorDied, ClusterError, StageTimeout
from nemo_like.cluster.options import TimeoutAction
from nemo_like.driver import whole_run
from nemo_like.driver.whole_run import RunEnd

DIED = ActorDied("policy_worker-0", "policy.train", "worker.log")
BROKEN = ActorBroken("policy_worker-0", "policy.train", "worker.log", "MemoryError: full", "MemoryError")
OTHERWISE = ActorBroken("policy_worker-0", "policy.train", "worker.log", "OSError: reset", "OSError")
LATE = StageTimeout("generation", "did not finish", [])


class Runs:
    """A run that ends, start by start, with these errors, and then well; ``steps`` are those of the latest
    checkpoint at each start."""

    def __init__(self, errors: Sequence[ClusterError], steps: Sequence[int]) -> None:
        self._errors, self._steps = list(errors), list(steps)
        self.num_starts = 0
        self.warnings: list[str] = []

    def checkpoints(self, *_: object) -> SimpleNamespace:
        return SimpleNamespace(last_step=self._steps.pop(0), warnings=())

    def start(self, *_: object) -> RunEnd:
        self.num_starts += 1
        if self._errors:
            raise self._errors.pop(0)
        return RunEnd("finished", 0)

    def make(self, directory: Path, **changed: Any) -> RunEnd:
        cfg: Any = SimpleNamespace(
            cluster=SimpleNamespace(max_restarts=3, on_stage_timeout=TimeoutAction.restart),
            checkpointing=SimpleNamespace(enabled=True, checkpoint_dir=None),
        )
        for name, value in changed.items():
            part, _, key = name.partition("__")
            setattr(getattr(cfg, part), key, value)
        place, checkpoints = SimpleNamespace(path=directory), self.checkpoints()
        logger = SimpleNamespace(warn=self.warnings.append, continue_after=lambda step: None)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(whole_run, "_run_once", self.start)
            patch.setattr(whole_run, "run_checkpoints", self.checkpoints)
            return whole_run._run_with_restarts(cfg, place, logger, checkpoints, None)  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [DIED, BROKEN, LATE])
def test_a_death_an_error_and_a_deadline_start_all_again(error: ClusterError, tmp_path: Path) -> None:
    runs = Runs([error], [4, 4])
    assert runs.make(tmp_path).exit_code == 0
    assert runs.warnings == [f"{error}\nstarting all processes again (restart 1 of 3)"]


def test_an_error_that_comes_again_before_any_progress_ends_the_run(tmp_path: Path) -> None:
    runs = Runs([BROKEN, BROKEN], [4, 4, 4])
    with pytest.raises(ActorBroken, match="MemoryError"):
        runs.make(tmp_path)
    assert runs.num_starts == 2
    assert runs.warnings[-1] == "MemoryError came again after all processes were started again"


def test_deaths_other_errors_and_those_after_some_progress_start_all_again(tmp_path: Path) -> None:
    assert Runs([DIED, DIED], [4, 4, 4]).make(tmp_path).exit_code == 0
    assert Runs([BROKEN, OTHERWISE], [4, 4, 4]).make(tmp_path).exit_code == 0
    assert Runs([BROKEN, BROKEN], [4, 4, 6]).make(tmp_path).exit_code == 0


@pytest.mark.parametrize("disk_name", ["run", "checkpoints", "temporary"])
def test_nothing_starts_again_on_a_full_disk(
    disk_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = tmp_path / disk_name
    monkeypatch.setattr(
        "nemo_like.observability.disk._free_bytes", lambda directory: 4096 if directory == disk else 1 << 30
    )
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "temporary"))
    runs = Runs([DIED], [4])
    with pytest.raises(ActorDied):
        runs.make(tmp_path / "run", checkpointing__checkpoint_dir=str(tmp_path / "checkpoints"))
    assert runs.num_starts == 1


@pytest.mark.parametrize(
    ("error", "changed"),
    [
        pytest.param(DIED, {"checkpointing__enabled": False}, id="no checkpoints"),
        pytest.param(DIED, {"cluster__max_restarts": 0}, id="no restarts"),
        pytest.param(
            LATE, {"cluster__on_stage_timeout": TimeoutAction.stop}, id="a deadline that is to stop"
        ),
    ],
)
def test_where_no_restart_is_allowed_the_error_ends_the_run(
    error: ClusterError, changed: dict[str, Any], tmp_path: Path
) -> None:
    runs = Runs([error], [4, 4])
    with pytest.raises(type(error)):
        runs.make(tmp_path, **changed)
    assert runs.num_starts == 1
