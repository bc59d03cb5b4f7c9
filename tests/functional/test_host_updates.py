"""An optimizer whose state is on the host updates weights as one on the GPU does.

There is no GPU here. Megatron-core's HybridDeviceOptimizer runs with tensors that say where they are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from safetensors.torch import load_file

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from nemo_like.policy.megatron.optimizer import chained_optimizers, optimizer_state
from nemo_like.policy.options import PolicyConfig, Precision
from tests.functional.marked_host import MarkedHost, is_marked
from tests.functional.policy_fixtures import loss_config, make_checkpoint, policy_config, random_batch
from tests.functional.test_policy_backend import policy_batch, schedule_of
from tests.functional.test_policy_resume import Rounds, train_after_saving, train_rounds
from tests.functional.worlds import run_world


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "qwen3")


def configured(model: Path, *, on_host: bool, **options: Any) -> PolicyConfig:
    cfg = policy_config(model, precision=Precision.bfloat16, **options)
    cfg.megatron_cfg.optimizer_cpu_offload = on_host
    return cfg


def on_marked_host(coordinates: Coordinates, rounds: Rounds, *args: Any) -> list[float]:
    with MarkedHost():
        return rounds(coordinates, *args)


def run(
    path: Path, cfg: PolicyConfig, resume_from: Path | None = None, rounds: Rounds = train_rounds
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The gradient norms of the last round, and the weights after it."""
    (path / "checkpoint").mkdir(parents=True)
    every = run_world(on_marked_host, parallel_layout(cfg), rounds, cfg, path, resume_from)
    (norms, *_) = [norms for norms in every if norms]
    (file,) = (path / "export").glob("*.safetensors")
    return norms, load_file(file)


def assert_alike(one: tuple[list[float], Any], other: tuple[list[float], Any]) -> None:
    assert one[0] == other[0]
    for name, weight in one[1].items():
        torch.testing.assert_close(other[1][name], weight, rtol=0, atol=0)


def test_updates_and_checkpoints_on_the_host_are_those_of_the_gpu(model: Path, tmp_path: Path) -> None:
    on_gpu, on_host = (configured(model, on_host=value, dp=2) for value in (False, True))
    expected = run(tmp_path / "gpu", on_gpu)
    assert_alike(expected, run(tmp_path / "host", on_host))
    for saved_by in ("gpu", "host"):
        assert_alike(expected, run(tmp_path / f"{saved_by}, host", on_host, tmp_path / saved_by))
    assert_alike(expected, run(tmp_path / "host, gpu", on_gpu, tmp_path / "host"))


def test_a_checkpoint_from_before_the_first_update_on_the_host_is_continued(
    model: Path, tmp_path: Path
) -> None:
    cfg = configured(model, on_host=True)
    expected = run(tmp_path / "saved", cfg, rounds=train_after_saving)
    assert_alike(expected, run(tmp_path / "on", cfg, tmp_path / "saved", train_after_saving))


def held_on_host(coordinates: Coordinates, cfg: PolicyConfig) -> list[Any]:
    """Whether the optimizer's tensors are on the host, and what it and the gradients' buffers count."""
    with MarkedHost():
        policy = MegatronBackend(cfg, PolicyObjective(loss_config(), 1.0), coordinates)
        buffers = [buffer.grad_data.untyped_storage() for ddp in policy._ddps for buffer in ddp.buffers]
        sizes = [sum(storage.size() for storage in buffers)]
        batch = random_batch(16)
        schedule = schedule_of(cfg, batch)
        prev = policy.logprobs(policy_batch(batch), schedule)
        policy.train(policy_batch(batch, prev_logprobs=prev), schedule)
        sizes.append(sum(storage.size() for storage in buffers))
        (part,) = chained_optimizers(policy._optimizer)
        assert isinstance(part.optimizer, HybridDeviceOptimizer)
        held = [
            state[name] for state in part.optimizer.state.values() for name in ("exp_avg", "master_param")
        ]
        return [all(map(is_marked, held)), set(optimizer_state(policy._optimizer).steps), sizes]


def test_gradients_alone_leave_the_gpu_between_phases(model: Path) -> None:
    cfg = configured(model, on_host=True)
    cfg.offload_optimizer_for_logprob = True
    (found,) = run_world(held_on_host, parallel_layout(cfg), cfg)
    assert found == [True, {1}, [0, 0]]
