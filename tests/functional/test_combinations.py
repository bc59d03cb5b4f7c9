"""Runs of two steps with every pair of docs/reference/combinations.md that no other test holds together."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.algorithms.options import Overlap
from nemo_like.configuration import Config, load_config
from nemo_like.environments.registry import kind_of
from tests.combinations_page import BASES, CELLS, Cell, of_pictures, with_stand_ins
from tests.functional.conftest import SHAPES
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
    arithmetic_model: str,
    mixture_model: str,
    shapes_model: str,
    sums_model: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, str]:
    """Checkpoints with the demo's tokenizer and arguments, by the word that stands for each on the page. What
    an agent works on is there too."""
    path = tmp_path_factory.mktemp("models")
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    larger, teacher = (
        untrained(arithmetic_model, path / f"of-{size}", arithmetic_model, hidden_size=size, **layers)
        for size in (192, 256)
    )
    vocab_size = AutoConfig.from_pretrained(sums_model).vocab_size
    calling = untrained(sums_model, path / "calling", mixture_model, vocab_size=vocab_size)
    pictures = [f"policy.model_name={shapes_model}", *of_pictures(Path(SHAPES))]
    models = {"TEACHER": teacher, "LARGER": larger, "MIXTURE": mixture_model, "CALLING_MIXTURE": calling}
    return {**models, "IMAGES": " ".join(pictures)}


def untrained(source: str, path: Path, architecture: str, **changes: Any) -> str:
    """A checkpoint like ``source``, but with random weights of the model of ``architecture``."""
    shutil.copytree(source, path)
    torch.manual_seed(3)
    config = AutoConfig.from_pretrained(architecture, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def finished(
    directory: Path, column: str, arguments: str, stand_ins: Mapping[str, str], *more: str
) -> FinishedRun:
    """A run of a column's configuration that has ended, with these arguments after those of the column."""
    base = BASES[column]
    own = with_stand_ins(f"{base.arguments} {arguments}", stand_ins)
    return run_grpo(directory, [*SMALL, *own, *more], config=base.configuration)


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
    run = finished(tmp_path, cell.column, cell.arguments, stand_ins)
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
    check_overlap(run, cfg)
    if any(kind_of(env).calls_policy for env in cfg.env.values()):
        assert min(run.metrics("train/env/sums/num_calls")) >= 1


def check_overlap(run: FinishedRun, cfg: Config) -> None:
    """Some groups trained before others had ended, and some tokens are as old as the run lets them be."""
    if cfg.grpo.overlap is Overlap.exact:
        journals = [path.read_text() for path in run.run_dir.glob("journal/*/driver.jsonl")]
        assert sum(journal.count('"event": "part"') for journal in journals) > NUM_STEPS
    # The first rollout begins with the first weights, and the second with the same unless it waits for a
    # checkpoint.
    stale = 0 if cfg.checkpointing.enabled else min(cfg.grpo.max_staleness, NUM_STEPS - 1)
    if cfg.grpo.max_staleness:
        assert run.metrics("train/max_staleness") == [0, stale]


def test_a_recording_of_agents_trains_alike_without_them(stand_ins: dict[str, str], tmp_path: Path) -> None:
    """Groups that train as they end train as all of them at once, too."""
    overlap = next(cell.arguments for cell in CELLS if (cell.column, cell.row) == ("agents", "exact overlap"))
    recorded = finished(tmp_path / "recorded", "agents", overlap, stand_ins, "rollout.record=true")
    check_overlap(recorded, trained(recorded))
    check_every_step(recorded, ["grad_norm"], ["loss", "reward"])
    replay = f"rollout.replay={recorded.run_dir / 'recorded'}"
    replayed = finished(tmp_path / "replayed", "agents", replay, stand_ins)
    trained(replayed)
    for name in ("train/loss", "train/grad_norm"):
        assert replayed.metrics(name) == pytest.approx(recorded.metrics(name), rel=1e-4, abs=1e-6)
    assert replayed.metrics("train/reward") == recorded.metrics("train/reward")


def test_a_killed_teacher_costs_a_restart(stand_ins: dict[str, str], tmp_path: Path) -> None:
    own = [*SMALL, *with_stand_ins(BASES["teacher"].arguments, stand_ins), "cluster.max_restarts=1"]
    own += ["checkpointing.enabled=true", "checkpointing.save_period=1"]
    program = ["-m", "tests.functional.killing_run", "teacher_worker:teacher_logprobs@2"]
    with running(tmp_path, own, program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=600)
    assert "actor 'teacher_worker' died during stage 'teacher.compute_teacher_logprobs'" in output
    trained(FinishedRun(process.returncode, output, run_dir, mark, []))
