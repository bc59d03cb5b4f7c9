"""Weights and optimizer state that leave the device between phases are the same again, on both backends.

On the CPU the same memory is given up and taken again, so that the tests are tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_like.batch.columns import POLICY_COLUMNS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.fsdp.backend import FSDPBackend
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import Device, PolicyConfig, Precision
from nemo_like.policy.workers.worker import PolicyWorker
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import run_world

BATCH = random_batch(8)


@dataclass(frozen=True)
class Report:
    logprobs: torch.Tensor
    bytes_between_phases: list[int]


def two_steps(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Report:
    """Every phase of two steps with a checkpoint loaded in between; exports the weights."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(kl_penalty=0.1), coordinates, plane)
    held = [held_bytes(worker)]
    for step in range(2):
        meta = put_samples(plane, f"step-{step}", BATCH)
        scoring, training = (
            shard(meta, num_shards=1, global_batch_size=8, strategy=strategy(cfg))[0]
            for shard, strategy in (
                (shard_for_logprobs, logprob_strategy),
                (shard_for_training, train_strategy),
            )
        )
        worker.compute_logprobs(scoring, POLICY_COLUMNS)
        held.append(held_bytes(worker))
        logprobs = torch.from_numpy(plane.fetch(scoring, ["prev_logprobs"])["prev_logprobs"].copy())
        worker.train(training)
        held.append(held_bytes(worker))
        checkpoint = path / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        worker.save_checkpoint(str(checkpoint), CheckpointWriting.background)
        worker.wait_for_checkpoint()
        worker.load_checkpoint(str(checkpoint), version=step + 1)
        held.append(held_bytes(worker))
    worker.export_hf(str(path / "export"))
    return Report(logprobs, [*held, held_bytes(worker)])


def held_bytes(worker: PolicyWorker) -> int:
    """Of the model's own memory, and FSDP's optimizer's."""
    backend = worker._backend
    tensors = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in backend._model.parameters()
    ]
    if isinstance(backend, FSDPBackend):
        tensors += backend._moments()
    return sum(tensor.untyped_storage().size() for tensor in tensors)


@pytest.mark.parametrize("device", [Device.cpu, pytest.param(Device.cuda, marks=pytest.mark.gpu)])
@pytest.mark.parametrize(
    ("backend", "precision"),
    [
        ("megatron", Precision.float32),
        ("megatron", Precision.bfloat16),
        ("fsdp", Precision.float32),
    ],
)
def test_what_leaves_the_device_between_phases_trains_as_what_stays(
    backend: str, precision: Precision, device: Device, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model")
    logprobs, exported = [], []
    for leaves in (False, True):
        cfg = policy_config(model, backend=backend, device=device, precision=precision)
        cfg.offload_parameters_between_phases = leaves
        # In float32 Megatron-core's optimizer works on the model's own weights.
        shares_weights = backend == "megatron" and precision is Precision.float32
        cfg.offload_optimizer_for_logprob = leaves and not shares_weights
        path = tmp_path / f"leaves-{leaves}"
        (report,) = run_world(two_steps, parallel_layout(cfg), cfg, path, device=device)
        assert [size == 0 for size in report.bytes_between_phases] == [leaves] * 8
        logprobs.append(report.logprobs)
        exported.append(AutoModelForCausalLM.from_pretrained(path / "export").state_dict())
    # A GPU's kernels add up in any order.
    tolerance = (
        0.0 if device is Device.cpu else {Precision.float32: 1e-5, Precision.bfloat16: 0.05}[precision]
    )
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=tolerance)
    for name, weight in exported[0].items():
        torch.testing.assert_close(exported[1][name], weight, rtol=0, atol=tolerance)
