"""Every kind of process, killed in every stage: a run ends with the metrics of one that nothing disturbed.

One run in which each kind of process is killed once is in ``test_main_job``.
"""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.killing_run import STAGES
from tests.functional.runs import read_metrics, run_grpo, running, wait_until_gone

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(900)]

# The first step that starts from weights which the engines have already is the one after a validation.
SMALL = [
    *(
        "grpo.num_prompts_per_step=16",
        "policy.train_global_batch_size=64",
        "policy.train_micro_batch_size=32",
    ),
    *("grpo.max_num_steps=8", "grpo.val_at_start=false", "grpo.val_period=3", "grpo.max_val_samples=16"),
    *("checkpointing.save_period=1", "checkpointing.export_final_hf=false", "logger.wandb.mode=disabled"),
    "cluster.max_restarts=5",
]
# One kill per step, each in another stage. Weights are synchronised at a step's end, right before the next
# generation.
PLAN = [f"{stage}@{step}" for step, stage in zip((2, 4, 5, 6, 7), STAGES, strict=True)]
WITHIN_S = 600.0


def without_timings(run_dir: Path) -> list[dict[str, Any]]:
    return [without_measurements(record) for record in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def undisturbed(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    run = run_grpo(tmp_path_factory.mktemp("undisturbed"), SMALL)
    assert run.returncode == 0, run.output
    return without_timings(run.run_dir)


@contextmanager
def killing(
    log_dir: Path, kills: Iterable[tuple[str, str]], name: str | None = None
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A run in which each victim is killed at ``STAGE@STEP``."""
    plan = ",".join(f"{victim}:{moment}" for victim, moment in kills)
    with running(log_dir, SMALL, name, program=["-m", "tests.functional.killing_run", plan]) as run:
        yield run


@pytest.mark.slow
@pytest.mark.parametrize(
    "victim",
    ["engine-1", "rollout", "environment", "ray::SimpleStorageUnit", "ray::TransferQueueController"],
)
def test_what_can_be_replaced_is_and_nothing_else_starts_again(
    victim: str, undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with killing(tmp_path, [(victim, moment) for moment in PLAN]) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, output
    assert f"(recovery {len(PLAN)} of 10)" in output, output
    assert "starting all processes again" not in output, output
    assert without_timings(run_dir) == undisturbed, output
    assert wait_until_gone(mark) == []


@pytest.mark.slow
def test_a_policy_workers_death_starts_all_again_from_the_latest_checkpoint(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    with killing(tmp_path, [("policy_worker-1", moment) for moment in PLAN]) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, output
    noticed = re.findall(r"actor 'policy_worker-1' died during stage '([^']+)'", output)
    # A stage may be over before Ray tells of a death in it, which the next one then notices.
    stages = [*STAGES.values()]
    allowed = zip(stages, stages[1:] + stages[:1], strict=True)
    assert all(stage in pair for stage, pair in zip(noticed, allowed, strict=True)), output
    assert "(restart 5 of 5)" in output, output
    assert without_timings(run_dir) == undisturbed, output
    assert wait_until_gone(mark) == []


@pytest.mark.slow
def test_the_same_command_continues_a_run_whose_driver_died(
    undisturbed: list[dict[str, Any]], tmp_path: Path
) -> None:
    name = uuid.uuid4().hex
    for number in range(len(PLAN) + 1):
        kills = [("driver", moment) for moment in PLAN[number:]]
        with killing(tmp_path, kills, name) as (process, mark, run_dir):
            output, _ = process.communicate(timeout=WITHIN_S)
        assert process.returncode == (-9 if number < len(PLAN) else 0), output
    assert without_timings(run_dir) == undisturbed
    # Ray's agents try for a minute to report the death of their parent.
    assert wait_until_gone(mark, timeout_s=180) == []


@pytest.mark.slow
def test_a_run_that_only_generates_goes_on_where_it_was(arithmetic_model: str, tmp_path: Path) -> None:
    overrides = [*SMALL, "rollout.generate_only=true", "grpo.max_num_steps=3", "generation.num_engines=1"]
    program = ["-m", "tests.functional.killing_run", "engine:generation@2"]
    with running(tmp_path, overrides, program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=WITHIN_S)
    assert process.returncode == 0, output
    assert "doing step 2 again (recovery 1 of 10)" in output, output
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3]
    assert wait_until_gone(mark) == []
