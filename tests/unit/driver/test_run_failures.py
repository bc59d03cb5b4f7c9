from __future__ import annotations

import errno
from pathlib import Path

import pytest

from nemo_like.cluster.actor_errors import ActorDied, ActorFailed
from nemo_like.driver.run_failures import failure_reason
from nemo_like.observability.disk import DiskFull


def failed(cause: Exception) -> ActorFailed:
    return ActorFailed("rollout", "dump", "generation", cause, "logs/rollout.log")


def test_a_full_disk_is_told_as_that_whichever_process_met_it(tmp_path: Path) -> None:
    assert (
        failure_reason(failed(DiskFull("no space for the rollouts")), tmp_path) == "no space for the rollouts"
    )
    told = failure_reason(failed(OSError(errno.ENOSPC, "No space left on device")), tmp_path)
    assert told.startswith("no space for what the run writes: ")
    assert "rollout.dump failed" in told


def test_any_other_failure_is_told_as_it_is(tmp_path: Path) -> None:
    assert failure_reason(failed(ValueError("a wrong value")), tmp_path) == str(
        failed(ValueError("a wrong value"))
    )


def test_the_disk_that_is_full_is_named_where_there_are_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = {tmp_path / "run": 1 << 30, tmp_path / "checkpoints": 0, Path("/tmp"): 1 << 30}
    monkeypatch.setattr("nemo_like.observability.disk._free_bytes", free.__getitem__)
    told = failure_reason(ActorDied("engine-0", "start", "engine-0.log"), *free)
    assert told.startswith(
        f"no space for what the run writes: 0 B are free in {tmp_path / 'checkpoints'}, and more is needed"
    )
    assert told.endswith(
        "It was noticed by: actor 'engine-0' died during stage 'start'; its log is engine-0.log"
    )
