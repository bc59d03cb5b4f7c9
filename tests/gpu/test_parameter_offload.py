"""Weights that leave the device between phases are the same weights, on both backends.

On the CPU the same memory is given up and taken again, so that the tests are tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.config.schema import CheckpointWriting, Device, PolicyBackend, PolicyConfig
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.sharding import shard_for_logprobs, shard_for_training
from nemo_like.policy.layout import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.worker import PolicyWorker
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
    held = [weight_bytes(worker)]
    for step in range(2):
        meta = put_samples(plane, f"step-{step}", BATCH)
        scoring, training = (
            shard(meta, num_shards=1, global_batch_size=8, strategy=strategy(cfg))[0]
            for shard, strategy in (
                (shard_for_logprobs, logprob_strategy),
                (shard_for_training, train_strategy),
            )
        )
        worker.compute_prev_logprobs(scoring)
        held.append(weight_bytes(worker))
        worker.compute_reference_logprobs(scoring)
        logprobs = torch.from_numpy(plane.fetch(scoring, ["prev_logprobs"])["prev_logprobs"].copy())
        worker.train(training)
        held.append(weight_bytes(worker))
        checkpoint = path / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        worker.save_checkpoint(str(checkpoint), CheckpointWriting.background)
        worker.wait_for_checkpoint()
        worker.load_checkpoint(str(checkpoint), policy_version=step + 1)
        held.append(weight_bytes(worker))
    worker.export_hf(str(path / "export"))
    return Report(logprobs, [*held, weight_bytes(worker)])


def weight_bytes(worker: PolicyWorker) -> int:
    """Of the model's own memory."""
    parameters = [
        parameter.to_local() if isinstance(parameter, DTensor) else parameter
        for parameter in worker._backend._model.parameters()
    ]
    return sum(parameter.untyped_storage().size() for parameter in parameters)


@pytest.mark.parametrize("device", [Device.cpu, pytest.param(Device.cuda, marks=pytest.mark.gpu)])
@pytest.mark.parametrize("backend", PolicyBackend)
def test_weights_that_leave_the_device_between_phases_train_as_those_that_stay(
    backend: PolicyBackend, device: Device, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model")
    logprobs, exported = [], []
    for leaves in (False, True):
        cfg = policy_config(model, backend=backend, device=device)
        cfg.offload_parameters_between_phases = leaves
        path = tmp_path / f"leaves-{leaves}"
        (report,) = run_world(two_steps, parallel_layout(cfg), cfg, path, device=device)
        assert [size == 0 for size in report.bytes_between_phases] == [leaves] * 8
        logprobs.append(report.logprobs)
        exported.append(AutoModelForCausalLM.from_pretrained(path / "export").state_dict())
    tolerance = 0.0 if device is Device.cpu else 1e-5  # a GPU's kernels add up in any order
    torch.testing.assert_close(logprobs[1], logprobs[0], rtol=0, atol=tolerance)
    for name, weight in exported[0].items():
        torch.testing.assert_close(exported[1][name], weight, rtol=0, atol=tolerance)
