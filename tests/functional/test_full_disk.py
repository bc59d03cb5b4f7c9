"""A disk that gets full under a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.checkpoint.store import checkpoint_paths, read_checkpoint, verify_group_files
from nemo_like.observability.jsonl import without_measurements
from tests.disks import fill, small_disk
from tests.functional.runs import FinishedRun, run_grpo, running, wait_for_step, wait_until_gone

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]

NUM_STEPS = 12
COMMAND = [f"grpo.max_num_steps={NUM_STEPS}", "grpo.val_at_end=false", "checkpointing.save_period=1"]
# What a run asks for before it starts, and a little more.
DISK_BYTES = 120_000_000


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_a_sentence_and_with_space_it_continues_as_if_nothing_had_been(
    demo: FinishedRun, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", DISK_BYTES) as disk:
        with running(disk, COMMAND) as (process, mark, run_dir):
            wait_for_step(process, run_dir, step=2)
            filler = fill(disk)
            output, _ = process.communicate(timeout=120)
        assert process.returncode == 1, output
        assert "The run failed: no space for " in output
        assert f"are free in {run_dir}" in output
        assert "Traceback" not in output
        for path in checkpoint_paths(run_dir / "checkpoints"):
            verify_group_files(read_checkpoint(path))
        filler.unlink()
        resumed = run_grpo(disk, COMMAND, name=mark)
        assert resumed.returncode == 0, resumed.output
        assert "continuing after step" in resumed.output
        first = [without_measurements(record) for record in demo.records() if record["step"] <= NUM_STEPS]
        assert [without_measurements(record) for record in resumed.records()] == first


@pytest.mark.slow
def test_a_disk_that_gets_full_while_the_processes_start_costs_no_restart(
    arithmetic_model: str, tmp_path: Path
) -> None:
    with (
        small_disk(tmp_path / "disk", DISK_BYTES) as disk,
        running(disk, COMMAND) as (process, mark, run_dir),
    ):
        assert process.stdout is not None
        while "starting Ray" not in process.stdout.readline():
            pass
        fill(disk)
        output, _ = process.communicate(timeout=240)
        assert process.returncode == 1, output
        assert f"The run failed: no space for what the run writes: 0 B are free in {run_dir}" in output
        assert "starting all processes again" not in output
        assert "Traceback" not in output
        assert wait_until_gone(mark) == []
