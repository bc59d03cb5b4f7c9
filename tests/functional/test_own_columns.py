"""Columns of a user's own, from where they come to where they are used, over the real components.

They are in the recorded run of ``test_record_replay``, too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from nemo_like.batch.recordings import read_manifest
from nemo_like.observability.jsonl import without_measurements
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.recorder import read_rollout
from nemo_like.rollout.rollout_columns import recorded_columns
from tests.functional.runs import ROOT, SCORED, FinishedRun, run_grpo, without_dump

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

NUM_PROMPTS, NUM_GENERATIONS = 8, 4
MODULE = "tests.functional.own_columns"
SMALL = [
    "grpo.max_num_steps=2",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    f"policy.train_global_batch_size={NUM_PROMPTS * NUM_GENERATIONS}",
    "policy.data_parallel_size=2",
    "policy.megatron_cfg.tensor_model_parallel_size=2",
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "checkpointing.export_final_hf=false",
    "logger.wandb.mode=disabled",
    "env.arithmetic.kind=custom",
    f"++env.arithmetic.options={{target: '{MODULE}:Judge', arguments: {{}}}}",
    SCORED,
]
WEIGHTED = f"loss_fn.kind={MODULE}:weighted"
CREDITED = "loss_fn.kind=tests.functional.own_losses:credited"


@dataclass(frozen=True)
class Backends:
    policy: str
    data_plane: str

    @property
    def overrides(self) -> list[str]:
        chosen = [f"policy.backend={self.policy}", f"data_plane.backend={self.data_plane}"]
        if self.policy == "fsdp":
            chosen += [
                "policy.fsdp_cfg.tensor_parallel_size=2",
                "policy.megatron_cfg.tensor_model_parallel_size=1",
            ]
        return chosen


BACKENDS = [
    pytest.param(Backends("megatron", "simple"), marks=pytest.mark.slow),
    pytest.param(Backends("fsdp", "mooncake_cpu"), marks=pytest.mark.slow),
    pytest.param(Backends("megatron", "in_memory"), marks=pytest.mark.slow),
]


def finished(directory: Path, overrides: Sequence[str]) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, *overrides])
    assert run.returncode == 0, run.output
    return run


@dataclass(frozen=True)
class Recorded:
    run: FinishedRun
    backends: Backends


@pytest.fixture(
    scope="module", params=BACKENDS, ids=lambda backends: f"{backends.policy}-{backends.data_plane}"
)
def recorded(
    request: pytest.FixtureRequest, arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    directory = tmp_path_factory.mktemp("columns")
    keep = ["rollout.record=true", "rollout.dump_period=1"]
    run = finished(directory, [*request.param.overrides, *keep, CREDITED])
    return Recorded(run, request.param)


def dumped(run: FinishedRun, step: int) -> list[dict]:
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_dump_shows_what_the_environment_brought(recorded: Recorded) -> None:
    for line in dumped(recorded.run, 1):
        (turn,) = line["turns"]
        columns, num_response = line["columns"], line["num_response_tokens"]
        assert columns["notes"] == {"said": turn["content"], "is_right": line["reward"] == 1.0}
        assert columns["level"] == 1.0 + line["prompt"].count("9")
        expected = [0.0] * line["num_prompt_tokens"] + np.linspace(1, 0.5, num_response).tolist()
        assert columns["deserved"] == pytest.approx(expected)


def test_the_recording_has_the_prompt_s_value_once(recorded: Recorded) -> None:
    directory = recorded.run.run_dir / "recorded"
    columns = recorded_columns(read_manifest(directory))
    prompts = PromptBatch(RolloutMode.training, 1, 0, tuple(range(NUM_PROMPTS)), NUM_GENERATIONS)
    read = read_rollout(directory, columns, prompts).flat.columns
    assert read["level"].shape == (NUM_PROMPTS,)
    assert len(read["notes"]) == NUM_PROMPTS * NUM_GENERATIONS
    assert len(read["deserved"]) == len(read["input_ids"])


def test_a_replay_trains_as_the_recorded_run_did(recorded: Recorded, tmp_path: Path) -> None:
    replay = f"rollout.replay={recorded.run.run_dir / 'recorded'}"
    replayed = finished(tmp_path, [*recorded.backends.overrides, replay, CREDITED])
    for old, new in zip(recorded.run.records(), replayed.records(), strict=True):
        expected = without_dump(old)
        assert without_measurements(new) == {
            key: value for key, value in expected.items() if not key.startswith("weight_sync/")
        }


def test_the_loss_reads_what_the_environment_brought_of_every_token(recorded: Recorded) -> None:
    for step, credit in enumerate(recorded.run.metrics("train/credit"), start=1):
        credits = [
            line["columns"]["level"] * one
            for line in dumped(recorded.run, step)
            for one in line["columns"]["deserved"][line["num_prompt_tokens"] :]
        ]
        assert credit == pytest.approx(np.mean(credits), rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["loss_fn.kind=weighted"], "loss_fn.kind='weighted' must be one of cispo, distillation, "),
        ([f"loss_fn.kind={MODULE}:weihgted"], "has no 'weihgted'"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(
    arithmetic_model: str, tmp_path: Path, overrides: list[str], message: str
) -> None:
    run = run_grpo(tmp_path, [*SMALL, WEIGHTED, *overrides])
    assert run.returncode == 2
    assert message in run.output
    assert "Traceback" not in run.output


def test_a_column_that_nobody_brings_is_refused_before_anything_starts(
    arithmetic_model: str, tmp_path: Path
) -> None:
    without_judge = [one for one in SMALL if not one.lstrip("+").startswith("env.")]
    run = run_grpo(tmp_path, [*without_judge, WEIGHTED])
    assert run.returncode == 2
    assert f"'deserved' is read by loss_fn.kind={MODULE}:weighted, and nobody writes it" in run.output


def test_nothing_of_the_framework_knows_these_columns() -> None:
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "nemo_like").rglob("*.py")]
    assert sources
    for name in ("deserved", "own_columns"):
        assert not any(name in source for source in sources)
