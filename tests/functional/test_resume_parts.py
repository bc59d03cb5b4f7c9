"""A run that begins with parts of another run's checkpoint counts its own updates and trains on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import LRDecayStyle, PolicyConfig
from nemo_like.policy.workers.worker import PolicyWorker
from nemo_like.tripwires.measured import Measured
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.runs import FEWEST_PROCESSES, run_grpo
from tests.functional.test_policy_resume import LAYOUTS
from tests.functional.worlds import WorldPool

BATCH = random_batch(16)


class Round(NamedTuple):
    """A round of two updates: its gradient norm, the run's updates so far, and how many the optimizer counts
    besides those and the other run's."""

    norm: float
    num_updates: float
    step_gap: float


def trained(worker: PolicyWorker, plane: InMemoryDataPlane, name: str) -> Round | None:
    place, meta = worker.coordinates, put_samples(plane, name, BATCH)
    sizes = {"num_shards": place.layout.dp, "global_batch_size": 8}
    scoring = shard_for_logprobs(meta, strategy=logprob_strategy(worker.cfg), **sizes)
    worker.compute_logprobs(scoring[place.dp], [PREV_LOGPROBS])
    update = worker.train(shard_for_training(meta, strategy=train_strategy(worker.cfg), **sizes)[place.dp])
    if update is None:
        return None
    counts = (update.measured[name].value for name in (Measured.num_updates, Measured.optimizer_step_gap))
    return Round(update.metrics["grad_norm"].value, *counts)


def save_a_trained_one(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    found = trained(worker, plane, "first")
    save(worker, path / "checkpoint")
    worker.export_hf(str(path / "export"))
    return found


def save(worker: PolicyWorker, path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    worker.save_checkpoint(str(path), CheckpointWriting.blocking)
    worker.wait_for_checkpoint()


def take_weights(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    return begin(coordinates, cfg, path, ResumeParts.weights)


def take_weights_and_optimizer(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    return begin(coordinates, cfg, path, ResumeParts.weights_and_optimizer)


def take_all(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    return begin(coordinates, cfg, path, ResumeParts.all)


def begin(coordinates: Coordinates, cfg: PolicyConfig, path: Path, parts: ResumeParts) -> Round | None:
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    worker.load_checkpoint(str(path / "checkpoint"), version=0, parts=parts)
    found = trained(worker, plane, "second")
    save(worker, path / parts.name)
    worker.export_hf(str(path / f"export_{parts.name}"))
    return found


def begin_with_the_export(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    plane = InMemoryDataPlane()
    worker = ready_worker(replace(cfg, model_name=str(path / "export")), loss_config(), coordinates, plane)
    found = trained(worker, plane, "second")
    worker.export_hf(str(path / "export_new"))
    return found


def go_on(coordinates: Coordinates, cfg: PolicyConfig, path: Path) -> Round | None:
    """With a checkpoint of the run that had taken weights and optimizer."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    worker.load_checkpoint(str(path / ResumeParts.weights_and_optimizer.name), version=1)
    return trained(worker, plane, "third")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


def weights(path: Path) -> dict[str, torch.Tensor]:
    return {name: one for file in path.glob("*.safetensors") for name, one in load_file(file).items()}


@pytest.mark.parametrize(
    "layout",
    [
        *("DP2 with sharded optimizer", "DP2 in bfloat16", "FSDP, DP2"),
        pytest.param("TP2 with replicated optimizer", marks=pytest.mark.slow),
    ],
)
def test_what_a_run_takes_of_another_ones_checkpoint(
    layout: str, model: Path, pool: WorldPool, tmp_path: Path
) -> None:
    cfg = policy_config(model, **LAYOUTS[layout])
    cfg.scheduler.warmup_updates, cfg.scheduler.decay_style = 0, LRDecayStyle.constant

    def of(job: Callable[[Coordinates, PolicyConfig, Path], Round | None]) -> Round:
        rounds = pool.run(job, parallel_layout(cfg), cfg, tmp_path)
        return next(one for one in rounds if one is not None)

    assert of(save_a_trained_one).num_updates == 2
    # The weights alone: as if they were a model to begin with.
    alone = of(take_weights)
    assert alone == of(begin_with_the_export) == Round(alone.norm, 2, 0)
    expected, found = weights(tmp_path / "export_new"), weights(tmp_path / "export_weights")
    assert expected and all(torch.equal(found[name], one) for name, one in expected.items())
    # With the optimizer, at a constant rate: the updates of a run that continues, counted anew.
    continued = of(take_all)
    assert continued.num_updates == 4 and continued.norm != alone.norm
    assert of(take_weights_and_optimizer) == Round(continued.norm, 2, 0)
    expected, found = weights(tmp_path / "export_all"), weights(tmp_path / "export_weights_and_optimizer")
    assert all(torch.equal(found[name], one) for name, one in expected.items())
    assert of(go_on)[1:] == (4, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.whole_run
def test_a_run_begins_at_step_0_with_the_weights_of_another_and_other_data(tmp_path: Path) -> None:
    arguments = [
        *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4"),
        *("policy.train_global_batch_size=32", "policy.scheduler.warmup_updates=0"),
        *("policy.optimizer.lr=0.002", "loss_fn.reference_policy_kl_penalty=0.01", "grpo.val_period=0"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "checkpointing.metric_name=null"),
        *("debug.tripwires=all", *FEWEST_PROCESSES),
    ]
    first = run_grpo(tmp_path, arguments)
    assert first.returncode == 0, first.output
    step = first.run_dir / "checkpoints" / "step_2"
    begun = [*arguments, f"checkpointing.resume_from_path={step}", "checkpointing.resume_parts=weights"]
    second = run_grpo(tmp_path, [*begun, "grpo.seed=7", "data.train.digits=1"])
    assert second.returncode == 0, second.output
    assert f"the run takes of {step} the weights alone, and begins at step 0 with its own" in second.output
    assert second.metrics("step") == [1, 2]
    assert second.metrics("train/lr") == first.metrics("train/lr")
    # The reference is still policy.model_name, and the engines have the weights of the checkpoint.
    assert first.metrics("train/kl_penalty")[0] == 0 < second.metrics("train/kl_penalty")[0]
    assert max(second.metrics("train/token_mult_prob_error")) < 1.00002
