"""Adapters train, the weights beside them do not, and everyone else sees the merged model."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.meta import Schedule
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import PolicyConfig, Precision
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    make_schedule,
    policy_config,
    random_batch,
)
from tests.functional.worlds import run_world

NUM_SAMPLES, NUM_PHASES = 8, 4
TEMPERATURE = 0.8
TARGETS = ("q_proj", "down_proj")
MIXTURE = {"model_type": "qwen3_moe", "targets": ("q_proj", "gate_proj", "up_proj", "down_proj")}
FSDP = {"backend": "fsdp"}


@dataclass(frozen=True)
class LoraReport:
    """What one rank saw; log-probs are per sample of its shard."""

    positions: list[int]
    before: torch.Tensor
    reference_before: torch.Tensor
    losses: list[float]
    after: torch.Tensor
    reference_after: torch.Tensor
    sent: dict[str, torch.Tensor]
    announced: list[tuple[str, str, tuple[int, ...]]]
    adapters: dict[str, torch.Tensor]
    announced_adapters: list[tuple[str, str, tuple[int, ...]]]


def train_adapters(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any], export: str
) -> LoraReport:
    """One rank: a few phases of training on the same samples."""
    from nemo_like.policy.batch.policy_batch import PolicyBatch
    from nemo_like.policy.loss.objective import PolicyObjective

    policy = backend_of(cfg)(cfg, PolicyObjective(loss, TEMPERATURE), coordinates)
    positions = list(range(coordinates.dp, NUM_SAMPLES, coordinates.layout.dp))
    columns = {
        name: torch.cat([torch.from_numpy(values).split(batch["lengths"])[row] for row in positions])
        for name, values in batch["columns"].items()
    }
    lengths = [batch["lengths"][row] for row in positions]
    tags = {
        name: [float(batch["tags"][name][row]) for row in positions] for name in ("advantage", "sample_mask")
    }
    everyone = make_schedule(batch["lengths"], batch["tags"]["sample_mask"], [[]], [list(range(NUM_SAMPLES))])
    pairs = [[row, row + 1] for row in range(0, len(positions), 2)]
    mine = make_schedule(lengths, tags["sample_mask"], [pairs], [[]])
    schedule = Schedule(
        (replace(everyone.global_batches[0], micro_batches=mine.global_batches[0].micro_batches),)
    )

    def policy_batch(**more: torch.Tensor) -> PolicyBatch:
        return PolicyBatch({**columns, **more}, lengths, tags, policy.device)

    before = policy.logprobs(policy_batch(), schedule)
    reference_before = policy.reference_logprobs(policy_batch(), schedule)
    training = policy_batch(prev_logprobs=before, reference_logprobs=reference_before)
    losses = [policy.train(training, schedule)["loss"] for _ in range(NUM_PHASES)]
    policy.export_hf(Path(export))
    return LoraReport(
        positions,
        before,
        reference_before,
        [metric.total for metric in losses],
        policy.logprobs(policy_batch(), schedule),
        policy.reference_logprobs(policy_batch(), schedule),
        {name: weight.clone() for name, weight in policy.stage_weights()},
        [(spec.name, spec.dtype, spec.shape) for spec in policy.weight_metadata()],
        {name: adapter.clone() for name, adapter in policy.stage_adapters()},
        [(spec.name, spec.dtype, spec.shape) for spec in policy.adapter_metadata()],
    )


def backend_of(cfg: PolicyConfig) -> Any:
    from nemo_like.policy.fsdp.backend import FSDPBackend
    from nemo_like.policy.megatron.backend import MegatronBackend

    return FSDPBackend if cfg.backend == "fsdp" else MegatronBackend


@dataclass(frozen=True)
class Outcome:
    """A world's reports beside the checkpoint it started from and the one it exported."""

    path: Path  # of model and export
    cfg: PolicyConfig
    leaders: list[LoraReport]
    batch: dict[str, Any]
    checkpoint: dict[str, torch.Tensor]
    exported: dict[str, torch.Tensor]
    exported_logprobs: list[torch.Tensor]
    tolerance: float  # nats; a merged weight in bfloat16 is rounded, W and B @ A by themselves are too


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            {"dp": 2, "precision": Precision.bfloat16, **FSDP},
            marks=pytest.mark.slow,
            id="FSDP, DP2 in bfloat16",
        ),
        pytest.param({"tp": 2, **FSDP}, id="FSDP, TP2"),
        pytest.param({"tp": 2, "precision": Precision.bfloat16}, id="TP2 in bfloat16"),
        pytest.param({"tp": 2, "dropout": 0.2}, marks=pytest.mark.slow, id="TP2 with dropout"),
        pytest.param(MIXTURE, id="experts"),
        pytest.param({"ep": 2, "dp": 2, **MIXTURE}, marks=pytest.mark.slow, id="experts, EP2"),
        pytest.param({**FSDP, **MIXTURE}, id="FSDP, experts"),
        pytest.param(
            {"dp": 2, **FSDP, **MIXTURE},
            marks=pytest.mark.slow,
            id="FSDP, experts, DP2",
        ),
        pytest.param(
            {"ep": 2, "dp": 2, "model_type": "mixtral", "targets": ("w1", "w3", "w2")},
            marks=pytest.mark.slow,
            id="experts of Mixtral alone, EP2",
        ),
    ],
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    path = tmp_path_factory.mktemp("lora")
    options = {"dropout": 0.0, "model_type": "qwen3", "targets": TARGETS, **request.param}
    dropout, model_type, targets = (options.pop(name) for name in ("dropout", "model_type", "targets"))
    cfg = policy_config(make_checkpoint(path / "model", model_type), adapts=targets, **options)
    cfg = replace(
        cfg,
        lora=replace(cfg.lora, dropout=dropout),
        optimizer=replace(cfg.optimizer, lr=2e-2, weight_decay=0.0),
    )
    loss, batch = loss_config(kl_penalty=0.01), random_batch(NUM_SAMPLES)
    reports = run_world(train_adapters, parallel_layout(cfg), cfg, loss, batch, str(path / "export"))
    leaders = [
        report for rank, report in enumerate(reports) if parallel_layout(cfg).coordinates(rank).is_leader
    ]
    exported = DenseReference(replace(cfg, model_name=str(path / "export")), loss, TEMPERATURE)
    with torch.no_grad():
        logprobs = exported.logprobs(batch)
    checkpoint, merged = (stored(path / name, cfg.precision) for name in ("model", "export"))
    tolerance = 1e-5 if cfg.precision is Precision.float32 else 0.15
    return Outcome(path, cfg, leaders, batch, checkpoint, merged, logprobs, tolerance)


def stored(path: Path, precision: Precision) -> dict[str, torch.Tensor]:
    return {
        name: tensor.to(getattr(torch, precision.value))
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def test_the_loss_falls(outcome: Outcome) -> None:
    losses = [sum(parts) for parts in zip(*(report.losses for report in outcome.leaders), strict=True)]
    assert all(later < earlier for earlier, later in pairwise(losses))
    assert losses[-1] < losses[0] - 0.01


def test_only_the_layers_with_an_adapter_change(outcome: Outcome) -> None:
    for name, weight in outcome.exported.items():
        changed = not torch.equal(weight, outcome.checkpoint[name])
        assert changed is any(f".{target}." in name for target in outcome.cfg.lora.target_modules), name


def test_the_reference_policy_is_the_model_without_adapters(outcome: Outcome) -> None:
    for report in outcome.leaders:
        torch.testing.assert_close(report.reference_before, report.before, rtol=0, atol=0)
        torch.testing.assert_close(report.reference_after, report.before, rtol=0, atol=0)
        assert (report.after - report.before).abs().max() > 0.01


def test_the_merged_export_computes_what_the_adapters_do(outcome: Outcome) -> None:
    for report in outcome.leaders:
        expected = torch.cat([outcome.exported_logprobs[row] for row in report.positions])
        torch.testing.assert_close(report.after, expected, rtol=0, atol=outcome.tolerance)


def test_the_exported_adapter_beside_the_model_computes_what_the_merged_export_does(outcome: Outcome) -> None:
    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model(torch.arange(12)[None]).logits

    model, merged = (
        AutoModelForCausalLM.from_pretrained(outcome.path / name, dtype=torch.float32)
        for name in ("model", "export")
    )
    before = logits(model)
    after = logits(PeftModel.from_pretrained(model, outcome.path / "export" / "adapter"))
    error, change = (after - logits(merged)).abs().max(), (after - before).abs().max()
    assert error < outcome.tolerance
    assert error < 0.1 * change


def test_engines_are_sent_the_merged_weights_as_announced(outcome: Outcome) -> None:
    sender = outcome.leaders[0]
    assert described(sender.sent) == sender.announced
    assert not [name for name in sender.sent if "lora" in name or "base_layer" in name]
    for name, weight in sender.sent.items():
        assert torch.equal(weight, outcome.exported[name]), name


def test_what_is_sent_of_the_adapters_is_what_peft_finds_in_the_export(outcome: Outcome) -> None:
    sender = outcome.leaders[0]
    assert described(sender.adapters) == sender.announced_adapters
    exported = load_file(outcome.path / "export" / "adapter" / "adapter_model.safetensors")
    torch.testing.assert_close(sender.adapters, exported, rtol=0, atol=0)


def described(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    ]


def logprobs_of(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any]
) -> torch.Tensor:
    """Of all samples, before any update."""
    from nemo_like.policy.batch.policy_batch import PolicyBatch
    from nemo_like.policy.loss.objective import PolicyObjective

    policy = backend_of(cfg)(cfg, PolicyObjective(loss, TEMPERATURE), coordinates)
    rows = [*range(NUM_SAMPLES)]
    schedule = make_schedule(batch["lengths"], batch["tags"]["sample_mask"], [[rows]], [rows])
    columns = {name: torch.from_numpy(values) for name, values in batch["columns"].items()}
    return policy.logprobs(PolicyBatch(columns, batch["lengths"], batch["tags"], policy.device), schedule)


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_adapters_of_a_directory_are_those_that_were_exported(outcome: Outcome, backend: str) -> None:
    """With either backend, whichever of the two exported them."""
    begun = replace(outcome.cfg.lora, adapter_path=str(outcome.path / "export" / "adapter"))
    cfg = replace(policy_config(outcome.path / "model", backend=backend), lora=begun)
    (found,) = run_world(logprobs_of, parallel_layout(cfg), cfg, loss_config(), outcome.batch)
    if outcome.cfg.precision is Precision.float32:
        torch.testing.assert_close(found, torch.cat(outcome.exported_logprobs), rtol=0, atol=1e-5)
    else:
        assert (found - torch.cat(outcome.exported_logprobs)).abs().max() < outcome.tolerance
