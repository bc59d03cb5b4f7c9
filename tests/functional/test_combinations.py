"""Runs of two steps with every pair of docs/combinations.md that no other test holds together."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.config.loader import load_config
from nemo_like.config.schema import Config
from tests.combinations_page import BASES, CELLS, Cell, with_stand_ins
from tests.functional.runs import FinishedRun, run_grpo, running

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(900)]

NUM_STEPS = 2
SMALL = [
    *("grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=4"),
    *(f"grpo.max_num_steps={NUM_STEPS}", "policy.train_global_batch_size=16"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"),
    *("policy.data_parallel_size=1", "generation.num_engines=1"),
    *("checkpointing.enabled=false", "checkpointing.export_final_hf=false", "logger.wandb.mode=disabled"),
]


@pytest.fixture(scope="module")
def stand_ins(
    arithmetic_model: str, mixture_model: str, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, str]:
    """Checkpoints with the demo's tokenizer, by the word that stands for each on the page."""
    larger = tmp_path_factory.mktemp("models") / "larger"
    shutil.copytree(arithmetic_model, larger)
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(arithmetic_model, hidden_size=192)
    AutoModelForCausalLM.from_config(config).save_pretrained(larger)
    return {"TEACHER": str(larger), "LARGER": str(larger), "MIXTURE": mixture_model}


def arguments(cell: Cell, stand_ins: dict[str, str]) -> list[str]:
    return [*with_stand_ins(f"{BASES[cell.column]} {cell.arguments}", stand_ins)]


def trained(run: FinishedRun) -> Config:
    """The configuration of a run that ended well, with both steps in its metrics."""
    assert run.returncode == 0, run.output
    assert [record["step"] for record in run.records()] == [*range(1, NUM_STEPS + 1)]
    return load_config(run.run_dir / "config.yaml")


def check_every_step(run: FinishedRun, positive: Sequence[str], finite: Sequence[str]) -> None:
    for record in run.records():
        assert all(0 < record[f"train/{name}"] < math.inf for name in positive), record
        assert all(math.isfinite(record[f"train/{name}"]) for name in finite), record


@pytest.mark.parametrize(
    "cell",
    [cell for cell in CELLS if cell.verdict == "runs"],
    ids=lambda cell: f"{cell.column}, {cell.row}",
)
def test_two_steps_train_all_that_the_run_has(cell: Cell, stand_ins: dict[str, str], tmp_path: Path) -> None:
    run = run_grpo(tmp_path, [*SMALL, *arguments(cell, stand_ins)])
    cfg = trained(run)
    if cfg.rollout.generate_only:
        assert not any(name.endswith("grad_norm") for record in run.records() for name in record)
        return
    check_every_step(run, ["grad_norm"], ["loss", "reward"])
    if cfg.value is not None:
        check_every_step(run, ["value/grad_norm", "value/loss"], ["value/mean", "value/returns"])
    if cfg.teacher is not None:
        check_every_step(run, [], ["teacher_divergence"])
        assert min(run.metrics("timing/train/teacher_logprobs")) > 0


def test_a_killed_teacher_costs_a_restart(stand_ins: dict[str, str], tmp_path: Path) -> None:
    own = [*SMALL, *with_stand_ins(BASES["teacher"], stand_ins), "cluster.max_restarts=1"]
    own += ["checkpointing.enabled=true", "checkpointing.save_period=1"]
    program = ["-m", "tests.functional.killing_run", "teacher_worker:teacher_logprobs@2"]
    with running(tmp_path, own, program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=600)
    assert "actor 'teacher_worker' died during stage 'teacher.compute_teacher_logprobs'" in output
    trained(FinishedRun(process.returncode, output, run_dir, mark, []))
