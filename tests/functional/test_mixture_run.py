"""Whole runs of a mixture of experts: a dense reference, every transport, stopped and continued."""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.configuration import load_config
from nemo_like.observability.jsonl import without_measurements
from scripts.demo_model.tiny_tokenizer import save_tokenizer
from scripts.demo_model.warm_start import tiny_mixture_config
from tests.functional.dense_reference import DenseReference
from tests.functional.matrix_of_runs import (
    DP2,
    EP1,
    EP2,
    IN_MEMORY,
    MIXTURE_CONFIG,
    NUM_STEPS,
    SEQUENCE_PARALLEL,
    SMALL,
    TOLERANCE,
    TP2,
    judged_by,
    weights,
)
from tests.functional.runs import ROOT, FinishedRun, copied_run, run_grpo

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]

NUM_PROMPTS, GROUP_SIZE = 16, 4
NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 2, 8, 2
EP2_TP2 = (*TP2, *SEQUENCE_PARALLEL, *EP2)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random mixture whose routers and next tokens are far from undecided."""
    path = tmp_path_factory.mktemp("model")
    config = tiny_mixture_config(8)
    config.initializer_range = 0.1
    # transformers gives the embedding of a padding token no gradient, and a random model samples that token.
    config.pad_token_id = None
    torch.manual_seed(5)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    save_tokenizer(path)
    return path


def small_run(directory: Path, model: Path, arguments: Sequence[str], name: str | None = None) -> FinishedRun:
    run = run_grpo(
        directory,
        [*SMALL, f"policy.model_name={model}", *judged_by("arithmetic"), *arguments],
        name,
        MIXTURE_CONFIG,
    )
    assert run.returncode == 0, run.output
    return run


# One update a step, so that all samples of a step are one batch.
RECORDED = (
    *("policy.train_global_batch_size=64", "checkpointing.enabled=true"),
    *("checkpointing.save_period=1", "checkpointing.keep_top_k=null"),
    *("policy.megatron_cfg.router_replay=true", "debug.tripwires=all"),
    *("rollout.record=true", "rollout.dump_period=1", *IN_MEMORY),
)


@pytest.fixture(scope="module")
def recorded(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Over two expert-parallel workers that replay what the engine's routers chose, with every step saved and
    recorded."""
    return small_run(tmp_path_factory.mktemp("recorded"), mixture, [*DP2, *EP2, *RECORDED])


def recorded_batch(path: Path) -> dict[str, Any]:
    """A recorded rollout as ``DenseReference`` takes it, with advantages of its own making."""
    with np.load(path) as entries:
        description = json.loads(entries["description.json"].tobytes())
        names = ("input_ids", "response_mask", "generation_logprobs")
        batch = {
            "lengths": entries["lengths"].tolist(),
            "columns": {name: entries[f"column/{name}"] for name in names},
        }
    rewards = description["tags"]["reward"]
    advantages = []
    for first in range(0, len(rewards), GROUP_SIZE):
        group = rewards[first : first + GROUP_SIZE]
        spread = statistics.stdev(group)
        advantages += [
            (reward - statistics.mean(group)) / (spread + 1e-6) if spread else 0.0 for reward in group
        ]
    return {**batch, "tags": {"advantage": advantages, "sample_mask": [1.0] * len(rewards)}}


def test_every_step_is_that_of_a_dense_model_with_torchs_adamw(recorded: FinishedRun) -> None:
    cfg = load_config(recorded.run_dir / "config.yaml")
    dense = DenseReference(cfg.policy, cfg.loss_fn, temperature=1.0)
    for step in range(1, NUM_STEPS + 1):
        batch = recorded_batch(recorded.run_dir / "recorded" / f"step_{step}-0.npz")
        rows = list(range(len(batch["lengths"])))
        prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
        engine = torch.from_numpy(batch["columns"]["generation_logprobs"])
        torch.testing.assert_close(torch.cat(prev), engine, rtol=0, atol=TOLERANCE)
        update = dense.update(batch, rows, prev, None, cfg.policy.optimizer.lr)
        (record,) = [one for one in recorded.records() if one["step"] == step]
        assert record["train/loss"] == pytest.approx(update.loss, abs=TOLERANCE)
        assert record["train/grad_norm"] == pytest.approx(update.grad_norm, abs=TOLERANCE, rel=TOLERANCE)
        assert record["train/grad_norm"] > 0.1
    exported = AutoModelForCausalLM.from_pretrained(recorded.run_dir / "final_hf", dtype=torch.float32)
    for name, weight in exported.state_dict().items():
        assert (weight - dense.weights()[name]).norm() < TOLERANCE * weight.norm()


def test_engines_have_every_expert_after_each_update(recorded: FinishedRun) -> None:
    errors = recorded.metrics("train/token_mult_prob_error")
    assert len(errors) == NUM_STEPS
    assert max(errors) < 1.00002


def test_engine_and_trainer_choose_alike_after_every_update(recorded: FinishedRun) -> None:
    assert len(recorded.metrics("train/routing_disagreement")) == NUM_STEPS
    assert max(recorded.metrics("train/routing_disagreement")) < 1e-3


def test_the_recording_has_the_experts_of_every_token_that_was_read(recorded: FinishedRun) -> None:
    manifest = json.loads((recorded.run_dir / "recorded" / "manifest.json").read_text())
    (column,) = (one for one in manifest["columns"] if one["name"] == "routed_experts")
    assert (column["dtype"], column["inner_shape"]) == ("uint8", [NUM_LAYERS, NUM_CHOSEN])
    with np.load(recorded.run_dir / "recorded" / "step_1-0.npz") as entries:
        lengths, experts = entries["lengths"], entries["column/routed_experts"]
    experts = experts.reshape(-1, NUM_LAYERS, NUM_CHOSEN)
    assert len(experts) == lengths.sum()
    last = np.cumsum(lengths) - 1
    assert not experts[last].any()
    others = np.delete(experts, last, axis=0)
    assert (others.min(), others.max()) == (1, NUM_EXPERTS)
    assert (others[..., 0] != others[..., 1]).all()


def test_a_dump_leaves_the_experts_out(recorded: FinishedRun) -> None:
    lines = (recorded.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()
    assert len(lines) == NUM_PROMPTS * GROUP_SIZE
    assert all("columns" not in json.loads(line) for line in lines)


def test_the_load_of_the_experts_is_reported(recorded: FinishedRun) -> None:
    for record in recorded.records():
        assert 1 < record["train/moe/max_load"] < 4  # of 8 experts, of which a token takes two
        assert 0.5 < record["train/moe/load_entropy"] < 1
        assert 0 <= record["train/moe/idle_experts"] < 0.5
        assert 0.5 < record["train/moe/top_expert_weight"] < 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param((*DP2, *EP2, "generation.weight_transport=collective"), id="EP2-collective"),
        pytest.param((*EP2_TP2, "generation.weight_transport=shared_memory"), id="EP2xTP2-shared_memory"),
        pytest.param((*EP2_TP2, "generation.weight_transport=collective"), id="EP2xTP2-collective"),
        pytest.param((*DP2, *EP2, "generation.weight_delta=true"), id="EP2-delta"),
        pytest.param(
            (*EP2_TP2, "generation.vllm_cfg.tensor_parallel_size=2", "generation.num_engines=1"),
            id="EP2xTP2-into-an-engine-of-TP2",
        ),
        pytest.param((*DP2, *EP2, "policy.megatron_cfg.moe_grouped_gemm=true"), id="EP2-grouped"),
    ],
)
def test_engines_sample_the_same_however_the_weights_come(
    recorded: FinishedRun, mixture: Path, arguments: tuple[str, ...], tmp_path: Path
) -> None:
    run = small_run(tmp_path, mixture, ["policy.train_global_batch_size=64", *arguments])
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00002
    check_same(run, recorded)


def check_same(run: FinishedRun, whole: FinishedRun) -> None:
    for key in ("train/loss", "train/grad_norm", "train/reward"):
        assert run.metrics(key) == pytest.approx(whole.metrics(key), abs=TOLERANCE, rel=TOLERANCE)
    mine, theirs = weights(run.run_dir / "final_hf"), weights(whole.run_dir / "final_hf")
    assert mine.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (mine[name] - tensor).norm() < TOLERANCE * tensor.norm(), name


def stopped_after_step_2(whole: FinishedRun, directory: Path) -> str:
    """The name of a copy of this run as it was before its last step."""
    copy = copied_run(whole, directory)
    shutil.rmtree(copy / "checkpoints" / f"step_{NUM_STEPS}")
    shutil.rmtree(copy / "final_hf")
    return copy.name


@pytest.mark.slow
def test_a_continued_run_ends_exactly_as_one_never_stopped(
    recorded: FinishedRun, mixture: Path, tmp_path: Path
) -> None:
    name = stopped_after_step_2(recorded, tmp_path)
    run = small_run(tmp_path, mixture, [*DP2, *EP2, *RECORDED], name)
    assert "continuing after step 2" in run.output
    assert [*map(without_measurements, run.records())] == [*map(without_measurements, recorded.records())]
    mine, theirs = weights(run.run_dir / "final_hf"), weights(recorded.run_dir / "final_hf")
    assert all(torch.equal(mine[name], tensor) for name, tensor in theirs.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [pytest.param(EP1, id="EP1"), pytest.param((*DP2, *EP1), id="DP2"), pytest.param(EP2_TP2, id="EP2xTP2")],
)
def test_a_run_continues_under_another_layout_of_its_experts(
    recorded: FinishedRun, mixture: Path, layout: tuple[str, ...], tmp_path: Path
) -> None:
    name = stopped_after_step_2(recorded, tmp_path)
    run = small_run(tmp_path, mixture, [*layout, *RECORDED], name)
    assert "continuing after step 2" in run.output
    check_same(run, recorded)


@pytest.mark.slow
def test_a_checkpoint_becomes_a_model_from_which_a_run_goes_on(recorded: FinishedRun, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/convert_checkpoint.py", str(recorded.run_dir), "--output"]
    subprocess.run([*command, str(tmp_path / "hf")], cwd=ROOT, check=True, timeout=120, capture_output=True)
    converted, exported = weights(tmp_path / "hf"), weights(recorded.run_dir / "final_hf")
    assert converted.keys() == exported.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
    # And back: the trainer loads what transformers and the engine load.
    run = small_run(tmp_path, tmp_path / "hf", ["grpo.max_num_steps=1", *EP2_TP2])
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00002


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param((), id="EP2"), pytest.param(EP1, id="EP1")])
def test_a_mixture_learns_to_add(mixture_model: str, layout: tuple[str, ...], tmp_path: Path) -> None:
    run = run_grpo(tmp_path, ["logger.wandb.mode=disabled", *layout], config=MIXTURE_CONFIG)
    assert run.returncode == 0, run.output
    first, *_, last = run.metrics("validation/accuracy")
    assert first < 0.45
    assert last > 0.8
    assert max(run.metrics("train/token_mult_prob_error")) < 1.0001
