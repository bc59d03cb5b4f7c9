"""A teacher's columns by workers on every layout, against a dense model; students that learn from them; whole
runs. Those by an engine are in ``test_generation.py``, which has one."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nemo_like.algorithms.distillation import forward_kl, jensen_shannon, reverse_kl
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.sharding import shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.groups.parallelism import parallel_layout, train_strategy
from nemo_like.policy.loss.checked_loss import own_reads
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.options import PolicyConfig, ReferencePlacement
from tests.functional import teachers
from tests.functional.dense_reference import with_all_rows
from tests.functional.policy_fixtures import (
    VOCAB_SIZE,
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
    teacher_config,
)
from tests.functional.runs import FEWEST_PROCESSES, FinishedRun, run_grpo
from tests.functional.teachers import TOLERANCE, TOP_K, check
from tests.functional.worlds import WorldPool

pytestmark = pytest.mark.timeout(300)

NUM_SAMPLES = 8
TEMPERATURE = 0.8
SLOW = pytest.mark.slow
LAYOUTS = [
    pytest.param({"tp": 2}, id="TP2"),
    pytest.param({"dp": 2, "backend": "fsdp"}, id="FSDP"),
    pytest.param({"cp": 2}, marks=SLOW, id="CP2"),
    pytest.param({"pp": 2, "micro_batching": MicroBatching.packed}, marks=SLOW, id="PP2, packed"),
    pytest.param({"dp": 2, "micro_batching": MicroBatching.shared}, marks=SLOW, id="DP2, prompts shared"),
    pytest.param({"tp": 2, "backend": "fsdp"}, marks=SLOW, id="FSDP TP2"),
    pytest.param({"cp": 2, "backend": "fsdp"}, marks=SLOW, id="FSDP CP2"),
]


@pytest.fixture(scope="module")
def worlds() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "model")


def check_all(
    ranks: Sequence[tuple[list[int], dict[str, np.ndarray]]], expected: list[dict[str, Tensor]]
) -> None:
    """Every sample was written once."""
    for numbers, columns in ranks:
        if numbers:
            check(numbers, columns, expected)
    assert sorted(number for numbers, _ in ranks for number in numbers) == [*range(len(expected))]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_workers_write_what_a_dense_model_says(
    checkpoint: Path, worlds: WorldPool, layout: dict[str, Any]
) -> None:
    cfg, batch = teacher_config(policy_config(checkpoint, **layout)), random_batch(NUM_SAMPLES)
    ranks = worlds.run(teachers.by_workers, parallel_layout(cfg), cfg, batch, TEMPERATURE)
    check_all(ranks, teachers.by_dense_model(checkpoint, batch, TEMPERATURE))


@pytest.fixture(scope="module")
def maths_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "maths", seed=12)


@pytest.mark.parametrize(
    ("layout", "group_size"),
    [
        pytest.param({}, 3, id="one process"),
        pytest.param({"dp": 2}, 3, id="DP2"),
        pytest.param({"dp": 2, "micro_batching": MicroBatching.shared}, 4, id="DP2, prompts shared"),
        pytest.param({"tp": 2, "reference_placement": ReferencePlacement.host_copy}, 3, id="TP2, host copy"),
        pytest.param({"dp": 2, "backend": "fsdp"}, 3, id="FSDP"),
        pytest.param({"pp": 2, "micro_batching": MicroBatching.packed}, 3, marks=SLOW, id="PP2, packed"),
        pytest.param({"cp": 2}, 3, marks=SLOW, id="CP2"),
        pytest.param({"tp": 2, "backend": "fsdp"}, 3, marks=SLOW, id="FSDP TP2"),
    ],
)
def test_each_task_has_the_columns_of_its_own_teacher(
    checkpoint: Path, maths_checkpoint: Path, worlds: WorldPool, layout: dict[str, Any], group_size: int
) -> None:
    """One group of one task and three of another, which two replicas cannot share evenly."""
    check_two_teachers(checkpoint, maths_checkpoint, worlds, layout, group_size)


def test_teachers_of_a_mixture_have_their_own_router_biases(tmp_path: Path, worlds: WorldPool) -> None:
    """The biases are buffers; a checkpoint has them beside the parameters."""
    logic, maths = (make_checkpoint(tmp_path / f"{seed}", "glm4_moe", seed=seed) for seed in (11, 12))
    check_two_teachers(logic, maths, worlds, {"dp": 2, "backend": "fsdp"}, 3)


def check_two_teachers(
    logic: Path, maths: Path, worlds: WorldPool, layout: dict[str, Any], group_size: int
) -> None:
    tasks = np.repeat(["logic", "maths", "logic", "logic"], group_size).tolist()
    batch = random_batch(len(tasks))
    batch["chunk_sizes"] = [group_size] * 4
    batch["tags"]["task"] = tasks
    cfg = teacher_config(policy_config(logic, **layout), {"maths": str(maths)})
    ranks = worlds.run(teachers.by_workers, parallel_layout(cfg), cfg, batch, TEMPERATURE, VOCAB_SIZE, 2)
    dense = {
        name: teachers.by_dense_model(path, batch, TEMPERATURE)
        for name, path in (("logic", logic), ("maths", maths))
    }
    check_all(ranks, [dense[task][number] for number, task in enumerate(tasks)])


def test_tokens_that_the_student_does_not_have_get_no_probability(
    checkpoint: Path, worlds: WorldPool
) -> None:
    """A teacher may have more tokens; here half of them are not the student's."""
    cfg, batch = teacher_config(policy_config(checkpoint)), random_batch(NUM_SAMPLES)
    half = VOCAB_SIZE // 2
    batch["columns"]["input_ids"] %= half
    (found,) = worlds.run(teachers.by_workers, parallel_layout(cfg), cfg, batch, TEMPERATURE, half)
    check(*found, teachers.by_dense_model(checkpoint, batch, TEMPERATURE, half))


# Students

DIVERGENCES: dict[str, dict[str, Any]] = {
    "reverse": {"divergence": "reverse"},
    "reverse_topk": {"divergence": "reverse_topk", "top_k": TOP_K},
    "forward": {"divergence": "forward", "top_k": TOP_K},
    "jensen_shannon": {"divergence": "jensen_shannon", "top_k": TOP_K, "beta": 0.3},
}


def taught_batch() -> dict[str, Any]:
    """A batch with what some teacher says of it."""
    batch, rng = random_batch(NUM_SAMPLES), np.random.default_rng(9)
    total, mask = sum(batch["lengths"]), batch["columns"]["response_mask"]
    ids = rng.permuted(np.tile(np.arange(VOCAB_SIZE, dtype=np.int32), (total, 1)), axis=1)[:, :TOP_K]
    probabilities = np.sort(rng.dirichlet(np.ones(TOP_K + 1), total)[:, :TOP_K])[:, ::-1]
    batch["columns"]["teacher_logprobs"] = (-3 * rng.random(total) * mask).astype(np.float32)
    batch["columns"]["teacher_topk_ids"] = ids * mask[:, None]
    batch["columns"]["teacher_topk_logprobs"] = (np.log(probabilities) * mask[:, None]).astype(np.float32)
    return {**batch, "more_columns": teachers.COLUMNS}


def student_loss(divergence: str) -> LossConfig:
    own = DIVERGENCES[divergence]
    return loss_config("distillation", **own, ratio_clip_c=None, force_on_policy_ratio=True)


def train_with_every_divergence(
    coordinates: Coordinates, cfg: PolicyConfig, batch: dict[str, Any]
) -> dict[str, dict[str, Metric]]:
    """One rank: an update with each, too small to move a weight; the leaders' metrics by divergence."""
    plane = InMemoryDataPlane()
    meta = put_samples(plane, "step", batch)
    worker = ready_worker(cfg, student_loss("reverse"), coordinates, plane, TEMPERATURE)
    shards = shard_for_training(
        meta, num_shards=cfg.data_parallel_size, global_batch_size=NUM_SAMPLES, strategy=train_strategy(cfg)
    )
    found = {}
    for name in DIVERGENCES:
        loss = student_loss(name)
        worker.loss, worker._own_reads = loss, own_reads(loss)
        worker._backend.objective = PolicyObjective(loss, TEMPERATURE)
        update = worker.train(shards[coordinates.dp])
        if update is not None:
            found[name] = dict(update.metrics)
    return found


def dense_updates(checkpoint: Path, batch: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Loss, gradient norm and divergence by a dense model in float64."""
    columns = {
        name: torch.from_numpy(np.array(values)).split(batch["lengths"])
        for name, values in batch["columns"].items()
    }
    found = {}
    for name, own_keys in DIVERGENCES.items():
        model = with_all_rows(AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64))
        losses, divergences = [], []
        for row, trains in enumerate(batch["tags"]["sample_mask"]):
            if not trains:
                continue
            ids, mask = columns["input_ids"][row].long(), columns["response_mask"][row].bool()
            logprobs = torch.log_softmax(model(ids[None]).logits[0, :-1] / TEMPERATURE, -1)[mask[1:]]
            if name == "reverse":
                own = logprobs.gather(1, ids[mask, None])[:, 0]
                apart = (own - columns["teacher_logprobs"][row][mask]).detach()
                losses.append(apart * (own - own.detach()).exp())
                divergences.append(apart)
                continue
            teacher = columns["teacher_topk_logprobs"][row][mask].double()
            student = logprobs.gather(1, columns["teacher_topk_ids"][row][mask].long())
            if name == "jensen_shannon":
                apart = jensen_shannon(teacher, student, own_keys["beta"])
            else:
                apart = (forward_kl if name == "forward" else reverse_kl)(teacher, student)
            losses.append(apart)
            divergences.append(apart.detach())
        loss = torch.cat(losses).mean()
        loss.backward()
        found[name] = {
            "loss": loss.item(),
            "grad_norm": torch.stack([weight.grad.norm() for weight in model.parameters()]).norm().item(),
            "teacher_divergence": torch.cat(divergences).mean().item(),
        }
    return found


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"dp": 2, "micro_batching": MicroBatching.shared}, marks=SLOW, id="DP2, prompts shared"),
        pytest.param({"tp": 2}, id="TP2"),
        pytest.param({"pp": 2}, marks=SLOW, id="PP2"),
        pytest.param({"cp": 2}, marks=SLOW, id="CP2"),
        pytest.param({"dp": 2, "backend": "fsdp"}, id="FSDP"),
        pytest.param({"tp": 2, "backend": "fsdp"}, marks=SLOW, id="FSDP TP2"),
        pytest.param({"cp": 2, "backend": "fsdp"}, marks=SLOW, id="FSDP CP2"),
    ],
)
def test_students_on_every_layout_have_the_gradients_of_a_dense_one(
    checkpoint: Path, worlds: WorldPool, layout: dict[str, Any]
) -> None:
    cfg, batch = policy_config(checkpoint, **layout), taught_batch()
    cfg = replace(
        cfg,
        optimizer=replace(cfg.optimizer, lr=1e-12, weight_decay=0.0),
        scheduler=replace(cfg.scheduler, min_lr=0.0),
    )
    ranks = worlds.run(train_with_every_divergence, parallel_layout(cfg), cfg, batch)
    leaders = [one for one in ranks if one]
    for name, expected in dense_updates(checkpoint, batch).items():
        metrics = merge(leader[name] for leader in leaders)
        found = {key: metrics[key].value for key in expected}
        assert found == pytest.approx(expected, rel=TOLERANCE, abs=1e-5), name


# Whole runs

CONFIG = "configs/distill_arithmetic_cpu.yaml"
NUM_STEPS = 2
SMALL = [
    *("grpo.num_prompts_per_step=16", "policy.train_global_batch_size=64"),
    *(f"grpo.max_num_steps={NUM_STEPS}", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("grpo.val_period=0", "logger.wandb.mode=disabled", "checkpointing.export_final_hf=false"),
    *FEWEST_PROCESSES,
]
TOPK = ("loss_fn.divergence=jensen_shannon", "loss_fn.top_k=5")
ENGINE = ("teacher.scored_by=engine", "teacher.data_parallel_size=1")


@pytest.fixture(scope="module")
def untrained_teacher(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model with the demo's tokenizer and random weights, larger than the demo's."""
    return larger_model(arithmetic_model, tmp_path_factory.mktemp("teacher") / "model", seed=3)


@pytest.fixture(scope="module")
def other_teacher(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return larger_model(arithmetic_model, tmp_path_factory.mktemp("other") / "model", seed=4)


def larger_model(model: str, path: Path, seed: int) -> str:
    shutil.copytree(model, path)
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(model, hidden_size=192)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def distilled(directory: Path, teacher: str, arguments: Sequence[str] = ()) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, f"teacher.model_name={teacher}", *arguments], None, CONFIG)
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def by_workers(untrained_teacher: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("workers")
    return distilled(directory, untrained_teacher, [*TOPK, "rollout.record=true"])


@pytest.mark.whole_run
@pytest.mark.timeout(900)
def test_a_student_learns_in_a_whole_run(by_workers: FinishedRun) -> None:
    records = by_workers.records()
    assert [record["train/policy_version"] for record in records] == [0, 1]
    assert all(record["train/teacher_divergence"] > 0 for record in records)
    assert all(record["train/grad_norm"] > 0 for record in records)
    assert all(record["timing/train/teacher_logprobs"] > 0 for record in records)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(1800)
def test_teachers_that_change_places_with_their_tasks_teach_alike(
    untrained_teacher: str, other_teacher: str, tmp_path: Path
) -> None:
    """Of two tasks, each is scored by its own teacher, whichever of the two is the teacher of all others."""
    tasks = (
        "env@env.second=arithmetic",
        "data.train=[{name: two}, {name: one, digits: 1, env: second}]",
    )
    first = distilled(
        tmp_path / "first",
        untrained_teacher,
        [*TOPK, "rollout.record=true", *tasks, f"teacher.models={{second: {other_teacher}}}"],
    )
    replayed = (*TOPK, f"rollout.replay={first.run_dir / 'recorded'}", *tasks)
    swapped = distilled(
        tmp_path / "swapped",
        other_teacher,
        [*replayed, f"teacher.models={{arithmetic: {untrained_teacher}}}", "teacher.backend=fsdp"],
    )
    alone = distilled(tmp_path / "alone", untrained_teacher, replayed)
    assert len(first.records()) == NUM_STEPS
    for before, after in zip(first.records(), swapped.records(), strict=True):
        for name in ("loss", "grad_norm", "teacher_divergence"):
            key = f"train/{name}"
            assert after[key] == pytest.approx(before[key], abs=TOLERANCE, rel=TOLERANCE)
    key = "train/teacher_divergence"
    assert abs(first.records()[0][key] - alone.records()[0][key]) > 10 * TOLERANCE


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "other",
    [
        pytest.param(ENGINE, id="engine"),
        pytest.param(
            ("teacher.data_parallel_size=1", "teacher.megatron_cfg.tensor_model_parallel_size=2"),
            id="TP2",
        ),
        pytest.param(("teacher.backend=fsdp",), id="FSDP"),
    ],
)
def test_other_teachers_teach_alike_on_one_recorded_rollout(
    by_workers: FinishedRun, untrained_teacher: str, other: Sequence[str], tmp_path: Path
) -> None:
    replayed = [*TOPK, f"rollout.replay={by_workers.run_dir / 'recorded'}", *other]
    again = distilled(tmp_path, untrained_teacher, replayed)
    for before, after in zip(by_workers.records(), again.records(), strict=True):
        for name in ("loss", "grad_norm", "teacher_divergence"):
            key = f"train/{name}"
            assert after[key] == pytest.approx(before[key], abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(1200)
def test_the_demo_learns_from_its_teacher(
    arithmetic_model: str, arithmetic_teacher: str, tmp_path: Path
) -> None:
    run = run_grpo(tmp_path, ["logger.wandb.mode=disabled"], None, CONFIG, timeout_s=850)
    assert run.returncode == 0, run.output
    accuracy, divergence = run.metrics("validation/accuracy"), run.metrics("train/teacher_divergence")
    assert accuracy[0] < 0.5
    assert accuracy[-1] > 0.94
    assert divergence[-1] < divergence[0] / 10
