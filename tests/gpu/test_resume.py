"""A policy that was saved and loaded trains on as if nothing had been, with the dropout that was next.

The cases marked gpu need a CUDA device; those on the CPU run the same lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import BACKEND_KINDS, Device, PolicyConfig, Precision
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.test_policy_resume import train
from tests.functional.worlds import run_world

BATCH = random_batch(16)
# A GPU adds up gradients in any order. Other dropout changes weights by a thousand times as much.
TOLERANCES = {Device.cpu: 0.0, Device.cuda: 1e-6}


@dataclass(frozen=True)
class Drawn:
    """What a worker draws next, after its second round of training."""

    device: torch.Tensor
    own: Mapping[str, torch.Tensor]


def two_rounds(coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None) -> Drawn:
    """Two rounds of updates with a checkpoint in between, or the second one alone, from a checkpoint."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    if resume_from is None:
        train(worker, put_samples(plane, "first", BATCH))
        checkpoint = path / "checkpoint"
        checkpoint.mkdir(parents=True)
        worker.save_checkpoint(str(checkpoint), CheckpointWriting.background)
        worker.wait_for_checkpoint()
    else:
        torch.rand(99, device=worker._backend.device)  # the generators are elsewhere
        worker.load_checkpoint(str(resume_from / "checkpoint"), version=1)
    train(worker, put_samples(plane, "second", BATCH))
    worker.export_hf(str(path / "export"))
    device = worker._backend.device
    own = {name: state.cpu() for name, state in worker._backend.random_states().items()}
    return Drawn(torch.rand(4, device=device).cpu(), own)


def config(model: Path, backend: str, device: Device, precision: Precision) -> PolicyConfig:
    cfg = policy_config(model, backend=backend, device=device, precision=precision)
    if backend == "megatron":
        return cfg
    return replace(cfg, lora=replace(cfg.lora, enabled=True, dropout=0.5))


@pytest.mark.parametrize(
    ("device", "precision"),
    [
        (Device.cpu, Precision.float32),
        pytest.param(Device.cpu, Precision.bfloat16, marks=pytest.mark.slow),
        *(pytest.param(Device.cuda, precision, marks=pytest.mark.gpu) for precision in Precision),
    ],
)
@pytest.mark.parametrize("backend", BACKEND_KINDS.names())
def test_training_and_its_random_numbers_go_on_where_they_were(
    backend: str, precision: Precision, device: Device, tmp_path: Path
) -> None:
    cfg = config(make_checkpoint(tmp_path / "model"), backend, device, precision)
    layout, whole, resumed = parallel_layout(cfg), tmp_path / "whole", tmp_path / "resumed"
    (expected,) = run_world(two_rounds, layout, cfg, whole, None, device=device)
    (drawn,) = run_world(two_rounds, layout, cfg, resumed, whole, device=device)
    assert drawn.device.equal(expected.device)
    assert drawn.own.keys() == expected.own.keys()
    assert all(state.equal(expected.own[name]) for name, state in drawn.own.items())
    names = sorted(file.name for file in (whole / "export").glob("*.safetensors"))
    assert names
    for name in names:
        weights = load_file(resumed / "export" / name)
        for key, tensor in load_file(whole / "export" / name).items():
            found, wanted = weights[key].float(), tensor.float()
            # In bfloat16 a weight may round to the next number.
            share = TOLERANCES[device] if precision is Precision.float32 or device is Device.cpu else 1e-3
            assert (found - wanted).norm() <= share * wanted.norm(), key
