"""Every layout of a critic's workers computes what a dense model in float64 does, and so does every layout of
the policy's workers with the advantages of tokens.

Each case is looked at from three sides, by workers of their own in real processes over gloo: a step of the
critic, the critic's gradient and the policy's. Workers compute in float32, so tensors are compared by norm,
relative to the reference's. For the gradients one update is made with an ``adam_eps`` far above any gradient:
AdamW then moves each weight by a multiple of its gradient.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import PARENT_GAPS, TOKEN_ADVANTAGES, VALUE_COLUMNS, Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.sharding import shard_for_training, shard_for_values
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.observability.metrics import merge
from nemo_like.policy.groups.group import with_epochs
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.groups.results import WorkerScores, WorkerUpdate
from nemo_like.policy.options import (
    LRDecayStyle,
    OptimizerKind,
    PolicyConfig,
    SchedulerConfig,
    ValueConfig,
)
from nemo_like.policy.workers.training_worker import TrainingWorker
from nemo_like.tripwires.measured import Measured
from tests.functional.dense_critic import (
    CriticUpdate,
    DenseCritic,
    Estimates,
    dense_logprobs,
    dense_policy_gradient,
)
from tests.functional.policy_fixtures import (
    PAD_ID,
    VOCAB_SIZE,
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    ready_value_worker,
    ready_worker,
    value_config,
)
from tests.functional.test_policy_parity import CountingDataPlane
from tests.functional.worlds import WorldPool

GROUPS = (4, 3, 5, 4, 2, 6)
NUM_SAMPLES, GLOBAL_BATCH_SIZE, NUM_EPOCHS = sum(GROUPS), 8, 2
TEMPERATURE = 0.8
TOLERANCE = 1e-5
KL = loss_config(kl_penalty=0.1, use_kl_in_reward=True)
# Two updates of warm-up to 2e-3, then linear from update 2 towards 1e-4 at update 6.
LEARNING_RATES = (1e-3, *(2e-3 - number * 1.9e-3 / 4 for number in range(5)))
GRADIENT_SCALE = 10.0  # by which times its gradient an update moves a weight
HUGE = 1e6
PACKED, DYNAMIC = {"micro_batching": MicroBatching.packed}, {"micro_batching": MicroBatching.dynamic}
SHARED = {"micro_batching": MicroBatching.shared}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
FSDP = {"backend": "fsdp"}
MIXTURE = {"model_type": "qwen3_moe"}
ADAPTERS = {"adapts": ("all-linear",)}
MUON = {"optimizer_kind": OptimizerKind.muon}


@dataclass(frozen=True)
class Case:
    """``layout`` are arguments of ``policy_config``, with those of ``critic`` for the critic alone, and
    ``model`` of ``make_checkpoint``."""

    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    critic: dict[str, Any] = field(default_factory=dict)
    are_forests: bool = False

    @property
    def batch(self) -> dict[str, Any]:
        return sessions() if self.are_forests else two_turns()


QUICK = [
    Case("TP2 with sequence parallelism, packed", {**SEQUENCE_PARALLEL, **PACKED}),
    Case("PP2, padded", {"pp": 2}),
    Case("DP2, prompts shared", {"dp": 2, **SHARED}),
    Case("CP2, packed", {"cp": 2, **PACKED}),
    Case("forests, CP2", {"cp": 2, **SHARED}, are_forests=True),
    Case("FSDP, DP2, packed", {"dp": 2, **PACKED, **FSDP}),
    Case("adapters, TP2 with sequence parallelism, packed", {**SEQUENCE_PARALLEL, **PACKED}, {}, ADAPTERS),
    Case("adapters, FSDP, DP2, packed", {"dp": 2, **PACKED, **FSDP}, {}, ADAPTERS),
]
SLOW = [
    Case("forests, one process", PACKED, are_forests=True),
    Case("forests, PP2 x DP2", {"pp": 2, "dp": 2, **SHARED}, are_forests=True),
    Case("forests, TP2 with sequence parallelism", {**SEQUENCE_PARALLEL, **SHARED}, are_forests=True),
    Case("forests, FSDP, CP2", {"cp": 2, **SHARED, **FSDP}, are_forests=True),
    Case("prompts shared, CP2", {"cp": 2, **SHARED}),
    Case("one process, prompts shared", SHARED),
    Case("TP2, dynamic", {"tp": 2, **DYNAMIC}),
    Case("FSDP, TP2, padded", {"tp": 2, **FSDP}),
    Case("one process, padded"),
    Case("one process, micro-batches of one", {"micro_batch_size": 1}),
    Case("one process, packed, recomputed", {"activation_checkpointing": True, **PACKED}),
    Case("one process, dynamic, on the host between phases", {"offloads": True, **DYNAMIC}),
    Case("TP2, prompts shared", {"tp": 2, **SHARED}),
    Case("TP2 with sequence parallelism, padded", SEQUENCE_PARALLEL),
    Case("PP2, prompts shared", {"pp": 2, **SHARED}),
    Case("PP2, packed", {"pp": 2, **PACKED}),
    Case("PP2 with two chunks, packed", {"pp": 2, "vpp": 2, **PACKED}, {"num_hidden_layers": 4}),
    Case("DP2, padded", {"dp": 2}),
    Case("DP2, dynamic, replicated optimizer", {"dp": 2, "use_distributed_optimizer": False, **DYNAMIC}),
    Case("CP2, padded", {"cp": 2}),
    Case("CP2 x TP2, packed", {"cp": 2, **SEQUENCE_PARALLEL, **PACKED}),
    Case("TP2 x PP2, untied", {"tp": 2, "pp": 2, **PACKED}, {"tied": False}),
    Case("TP2 x DP2, Qwen2", {"tp": 2, "dp": 2, **DYNAMIC}, {"model_type": "qwen2"}),
    Case("EP2, packed", {"ep": 2, "dp": 2, **PACKED}, MIXTURE),
    Case("EP2 with TP2", {"ep": 2, **SEQUENCE_PARALLEL}, MIXTURE),
    Case("FSDP, one process, prompts shared", {**SHARED, **FSDP}),
    Case("FSDP, DP2, dynamic", {"dp": 2, **DYNAMIC, **FSDP}),
    Case(
        "FSDP, TP2, packed, Llama, untied",
        {"tp": 2, **PACKED, **FSDP},
        {"model_type": "llama", "tied": False},
    ),
    Case("FSDP, CP2, packed", {"cp": 2, **PACKED, **FSDP}),
    Case("FSDP, TP2 x DP2, prompts shared", {"tp": 2, "dp": 2, **SHARED, **FSDP}),
    Case("adapters, TP2, dynamic", {"tp": 2, **DYNAMIC}, {}, ADAPTERS),
    Case("adapters, PP2, prompts shared", {"pp": 2, **SHARED}, {}, ADAPTERS),
    Case("adapters, DP2, on the host between phases", {"dp": 2, "offloads": True}, {}, ADAPTERS),
    Case("adapters, FSDP, TP2, padded", {"tp": 2, **FSDP}, {}, ADAPTERS),
    Case("Muon, TP2, packed", {"tp": 2, "use_distributed_optimizer": False, **PACKED}, {}, MUON),
    Case("Muon, FSDP, DP2, packed", {"dp": 2, **PACKED, **FSDP}, {}, MUON),
]


@cache
def two_turns() -> dict[str, Any]:
    """Samples of one or two turns in groups of several sizes. Some are masked, one of them without a reward,
    and some were cut off; one ends with what the environment said. Two begin by saying the padding token."""
    rng = np.random.default_rng(9)
    ids, masks, prompts = [], [], []
    for size in GROUPS:
        prompt = rng.integers(2, VOCAB_SIZE, rng.integers(2, 6))
        for _ in range(size):
            said = (rng.integers(1, 8), rng.integers(0, 5), rng.integers(0, 8))
            ids.append(np.r_[prompt, rng.integers(2, VOCAB_SIZE, sum(said))])
            masks.append(np.r_[np.zeros(len(prompt)), *(np.full(n, i != 1) for i, n in enumerate(said))])
            prompts.append(len(prompt))
    for row in (0, -2):
        ids[row][prompts[row]] = PAD_ID
    mask = np.concatenate(masks).astype(np.uint8)
    rewards = rng.normal(size=NUM_SAMPLES)
    rewards[3] = np.nan
    prev, reference = (-rng.random(len(mask)) * mask for _ in range(2))
    return {
        "lengths": [len(one) for one in ids],
        "chunk_sizes": list(GROUPS),
        "columns": {
            "input_ids": np.concatenate(ids).astype(np.int32),
            "response_mask": mask,
            "generation_logprobs": prev.astype(np.float32),
            "prev_logprobs": prev.astype(np.float32),
            "reference_logprobs": reference.astype(np.float32),
        },
        "tags": {
            "sample_mask": [float(row % 5 != 3) for row in range(NUM_SAMPLES)],
            "shaped_reward": rewards.tolist(),
            "is_truncated": [row % 3 == 1 for row in range(NUM_SAMPLES)],
            "advantage": [0.0] * NUM_SAMPLES,
            "num_response_tokens": [int(one.sum()) for one in masks],
            "num_prompt_tokens": prompts,
            "group_id": [group for group, size in enumerate(GROUPS) for _ in range(size)],
        },
    }


@cache
def sessions() -> dict[str, Any]:
    """The same samples, in which some tokens after the prompt follow others than the one before them, or
    none."""
    batch, rng = two_turns(), np.random.default_rng(4)
    columns, gaps = {**batch["columns"]}, []
    for length, num_prompt_tokens in zip(batch["lengths"], batch["tags"]["num_prompt_tokens"], strict=True):
        branches = (np.arange(length) >= num_prompt_tokens) & (rng.random(length) < 0.3)
        gaps.append(np.where(branches, [rng.integers(0, token + 1) for token in range(length)], 0))
    columns[PARENT_GAPS.name] = np.concatenate(gaps).astype(np.int32)
    places = np.concatenate([np.arange(length) for length in batch["lengths"]])
    mask = columns["response_mask"] * (columns[PARENT_GAPS.name] < places)
    for name in ("response_mask", "generation_logprobs", "prev_logprobs", "reference_logprobs"):
        columns[name] = (columns[name] * mask).astype(columns[name].dtype)
    counts = [int(one.sum()) for one in np.split(mask, np.cumsum(batch["lengths"])[:-1])]
    tags = {**batch["tags"], "num_response_tokens": counts}
    return {**batch, "columns": columns, "tags": tags, "more_columns": [PARENT_GAPS]}


def with_columns(batch: dict[str, Any], **columns: np.ndarray) -> dict[str, Any]:
    """The batch with these columns as float32, nan in masked samples."""
    mask = np.repeat(batch["tags"]["sample_mask"], batch["lengths"])
    spoilt = {name: np.where(mask > 0, one, np.nan).astype(np.float32) for name, one in columns.items()}
    return {**batch, "columns": {**batch["columns"], **spoilt}}


def gradient_config(group: PolicyConfig) -> PolicyConfig:
    """One update on all samples, which moves each weight by GRADIENT_SCALE times its gradient."""
    adam = {"kind": OptimizerKind.adamw, "adam_beta1": 0.9, "adam_beta2": 0.95, "adam_eps": HUGE}
    return replace(
        group,
        train_global_batch_size=NUM_SAMPLES,
        max_grad_norm=HUGE,
        optimizer=replace(group.optimizer, lr=GRADIENT_SCALE * HUGE, weight_decay=0.0, **adam),
        scheduler=SchedulerConfig(
            warmup_updates=0, decay_style=LRDecayStyle.constant, decay_updates=0, min_lr=0.0
        ),
    )


@dataclass(frozen=True)
class Jobs:
    """What a world does: configurations, and batches with the columns that are written by hand."""

    critic: ValueConfig
    batch: dict[str, Any]
    critic_once: ValueConfig
    valued: dict[str, Any]
    policy_once: PolicyConfig
    policy_loss: LossConfig
    scored: dict[str, Any]


# By name how far each weight moved, and what the leader returned.
Moved = tuple[dict[str, torch.Tensor], WorkerUpdate | None]


@dataclass(frozen=True)
class RankReport:
    """What one rank of a world saw; ``columns`` are its shard's, of a leader only. Weights are those that
    this rank gathered."""

    coordinates: Coordinates
    positions: list[int]
    columns: dict[str, np.ndarray]
    scores: WorkerScores | None
    update: WorkerUpdate | None
    weights: dict[str, torch.Tensor]
    written: list[tuple[str, str]]
    version: int
    critic_gradient: dict[str, torch.Tensor]
    critic_update: WorkerUpdate | None
    policy_gradient: dict[str, torch.Tensor]
    policy_update: WorkerUpdate | None


def run_jobs(coordinates: Coordinates, jobs: Jobs) -> RankReport:
    """One rank: all of them, each by a worker of its own."""
    plane = CountingDataPlane()
    meta = put(plane, jobs.batch, "prev_logprobs", "reference_logprobs")
    worker = ready_value_worker(jobs.critic, KL, coordinates, plane, inputs_of(jobs.batch))
    valuing = shard_for_values(
        meta,
        num_shards=coordinates.layout.dp,
        global_batch_size=GLOBAL_BATCH_SIZE,
        strategy=logprob_strategy(jobs.critic),
        train_strategy=train_strategy(jobs.critic),
    )[coordinates.dp]
    scores = worker.compute_values(valuing)
    update = worker.train(with_epochs(training_shard(worker, meta), NUM_EPOCHS))
    leads, names = coordinates.is_leader, [column.name for column in VALUE_COLUMNS]
    columns = plane.fetch(valuing, names) if leads else {}
    return RankReport(
        coordinates,
        [meta.sample_ids.index(sample) for sample in valuing.sample_ids],
        {name: np.array(column) for name, column in columns.items()},
        scores,
        update,
        gathered(worker),
        plane.written,
        worker.version,
        *critic_gradient(coordinates, jobs),
        *policy_gradient(coordinates, jobs),
    )


def critic_gradient(coordinates: Coordinates, jobs: Jobs) -> Moved:
    plane = CountingDataPlane()
    meta = put(plane, jobs.valued, "values", "returns")
    inputs = inputs_of(jobs.valued)
    return moved(ready_value_worker(jobs.critic_once, KL, coordinates, plane, inputs), meta)


def policy_gradient(coordinates: Coordinates, jobs: Jobs) -> Moved:
    plane = CountingDataPlane()
    meta = put(plane, jobs.scored, "prev_logprobs", "token_advantages")
    worker = ready_worker(
        jobs.policy_once,
        jobs.policy_loss,
        coordinates,
        plane,
        TEMPERATURE,
        [TOKEN_ADVANTAGES],
        inputs_of(jobs.scored),
    )
    return moved(worker, meta)


def inputs_of(batch: dict[str, Any]) -> Sequence[Column]:
    return batch.get("more_columns", ())


def put(plane: CountingDataPlane, batch: dict[str, Any], *columns: str) -> KVBatchMeta:
    """The batch with these columns, which other phases or other workers would have written."""
    meta = put_samples(plane, "step", batch)
    meta = plane.write(meta, {name: batch["columns"][name] for name in columns})
    plane.written.clear()
    return meta


def training_shard(worker: TrainingWorker, meta: KVBatchMeta) -> KVBatchMeta:
    return shard_for_training(
        meta,
        num_shards=worker.coordinates.layout.dp,
        global_batch_size=worker.cfg.train_global_batch_size,
        strategy=train_strategy(worker.cfg),
    )[worker.coordinates.dp]


def gathered(worker: TrainingWorker) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in worker._backend.stage_weights()}


def moved(worker: TrainingWorker, meta: KVBatchMeta) -> Moved:
    """The gradient of one update, by how far it moves the weights."""
    before = gathered(worker)
    update = worker.train(training_shard(worker, meta))
    after = gathered(worker)
    return {name: (before[name].double() - after[name]) / GRADIENT_SCALE for name in before}, update


@dataclass(frozen=True)
class DenseRun:
    """The same jobs by the dense reference."""

    estimates: Estimates
    updates: list[CriticUpdate]
    weights: dict[str, torch.Tensor]
    critic_once: CriticUpdate
    critic_gradient: dict[str, torch.Tensor]
    policy_loss: float
    policy_gradient: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """A case's world beside its dense reference."""

    case: Case
    ranks: list[RankReport]
    dense: DenseRun

    @property
    def leaders(self) -> list[RankReport]:
        return [rank for rank in self.ranks if rank.coordinates.is_leader]

    def metrics(self, phase: str) -> dict[str, float]:
        merged = merge(getattr(leader, phase).metrics for leader in self.leaders)
        return {name: metric.value for name, metric in merged.items()}

    def tensors(self, name: str) -> dict[str, torch.Tensor]:
        """Those that the ranks gathered. Megatron-core's tensor-parallel ranks each have a copy of a critic's
        head; the copies must be alike."""
        found = {key: tensor for rank in self.ranks for key, tensor in getattr(rank, name).items()}
        if not name.startswith("policy"):
            copies = found.pop("lm_head.weight")
            assert torch.equal(copies, copies[:1].expand_as(copies))
            found["score.weight"] = copies[:1]
        return found


class Matrix:
    """Outcomes of cases; no reference is computed twice."""

    def __init__(self, path: Path) -> None:
        self._path, self._pool = path, WorldPool()
        self._outcomes: dict[str, Outcome] = {}
        self._dense: dict[str, tuple[Jobs, DenseRun]] = {}

    def close(self) -> None:
        self._pool.close()

    def outcome(self, case: Case) -> Outcome:
        if case.name not in self._outcomes:
            jobs, dense = self._reference(case)
            group = policy_config(Path(jobs.critic.model_name), **case.layout, **case.critic)
            jobs = replace(jobs, critic=self._critic(group), critic_once=self._critic(gradient_config(group)))
            group = policy_config(Path(jobs.policy_once.model_name), **case.layout)
            jobs = replace(jobs, policy_once=gradient_config(group))
            ranks = self._pool.run(run_jobs, parallel_layout(group), jobs, timeout_s=200.0)
            self._outcomes[case.name] = Outcome(case, ranks, dense)
        return self._outcomes[case.name]

    @staticmethod
    def _critic(group: PolicyConfig) -> ValueConfig:
        return value_config(group, clip_range=0.05, gae_gamma=0.97, gae_lambda=0.9)

    def _reference(self, case: Case) -> tuple[Jobs, DenseRun]:
        key = re.sub(r"\W+", "-", f"{case.model} {case.critic} {case.are_forests}")
        if key not in self._dense:
            critic = make_checkpoint(self._path / f"critic{key}", **case.model, is_critic=True)
            policy = make_checkpoint(self._path / f"policy{key}", **case.model)
            self._dense[key] = dense_run(
                self._critic(policy_config(critic, **case.critic)),
                gradient_config(policy_config(policy)),
                case.batch,
            )
        return self._dense[key]


def dense_run(cfg: ValueConfig, policy_once: PolicyConfig, batch: dict[str, Any]) -> tuple[Jobs, DenseRun]:
    """The jobs, and what the reference makes of them."""
    rng = np.random.default_rng(3)
    num_tokens = sum(batch["lengths"])
    dense = DenseCritic(cfg)
    estimates = dense.estimates(batch, KL)
    critic_once = value_config(gradient_config(cfg), clip_range=cfg.clip_range)
    jobs = Jobs(
        critic=cfg,
        batch=batch,
        critic_once=critic_once,
        valued=with_columns(
            batch,
            values=estimates.values + rng.uniform(-0.1, 0.1, num_tokens),
            returns=rng.normal(size=num_tokens),
        ),
        policy_once=policy_once,
        policy_loss=loss_config(),
        scored=with_advantages(batch, policy_once, rng),
    )
    updates = [
        dense.update(
            batch, range(first, first + GLOBAL_BATCH_SIZE), estimates.values, estimates.returns, rate
        )
        for first, rate in zip(
            [*range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE)] * NUM_EPOCHS, LEARNING_RATES, strict=True
        )
    ]
    once = DenseCritic(critic_once)
    columns = jobs.valued["columns"]
    update_once = once.update(jobs.valued, range(NUM_SAMPLES), columns["values"], columns["returns"], 0.0)
    policy_loss, gradient = dense_policy_gradient(policy_once, jobs.policy_loss, jobs.scored, TEMPERATURE)
    run = DenseRun(estimates, updates, dense.weights(), update_once, once.gradient(), policy_loss, gradient)
    return jobs, run


def with_advantages(batch: dict[str, Any], cfg: PolicyConfig, rng: np.random.Generator) -> dict[str, Any]:
    """The batch for a policy whose ratios are on both sides of both limits."""
    num_tokens = sum(batch["lengths"])
    scored = with_columns(
        batch,
        prev_logprobs=dense_logprobs(cfg, batch, TEMPERATURE) + rng.normal(0, 0.3, num_tokens),
        token_advantages=rng.normal(size=num_tokens),
    )
    tags = {"advantage": [-0.3] * NUM_SAMPLES, "token_scale": [1.7] * NUM_SAMPLES}
    return {**scored, "tags": {**scored["tags"], **tags}}


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    matrix = Matrix(tmp_path_factory.mktemp("value"))
    yield matrix
    matrix.close()


@pytest.fixture(
    scope="module",
    params=[*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)],
    ids=lambda case: case.name,
)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Each tensor differs from the expected one by a small part of that one's norm."""
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name].double() - tensor).norm() / tensor.norm())
        for name, tensor in expected.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < TOLERANCE, (worst, errors[worst])


def test_values_returns_and_advantages_equal_those_of_the_dense_model(outcome: Outcome) -> None:
    batch, dense = outcome.case.batch, outcome.dense.estimates
    bounds = np.cumsum(batch["lengths"])[:-1]
    for name, of_all in (
        ("values", dense.values),
        ("returns", dense.returns),
        ("token_advantages", dense.advantages),
    ):
        expected = np.split(of_all, bounds)
        for leader in outcome.leaders:
            column = np.concatenate([expected[position] for position in leader.positions])
            np.testing.assert_array_equal(np.isnan(leader.columns[name]), np.isnan(column))
            is_number = ~np.isnan(column)
            difference = np.linalg.norm((leader.columns[name] - column)[is_number])
            assert difference < TOLERANCE * np.linalg.norm(column[is_number])
    positions = [position for leader in outcome.leaders for position in leader.positions]
    assert sorted(positions) == list(range(NUM_SAMPLES))


def test_the_sums_of_advantages_are_those_of_the_dense_model(outcome: Outcome) -> None:
    bounds = np.cumsum(outcome.case.batch["lengths"])[:-1]
    advantages = np.split(outcome.dense.estimates.advantages, bounds)
    for leader in outcome.leaders:
        expected = [advantages[position] for position in leader.positions]
        close = {"rel": TOLERANCE, "abs": TOLERANCE, "nan_ok": True}
        tags = leader.scores.tags
        assert tags["token_advantage_sum"] == pytest.approx([one.sum() for one in expected], **close)
        assert tags["token_advantage_square_sum"] == pytest.approx(
            [np.square(one).sum() for one in expected], **close
        )


def test_how_well_values_fit_is_measured_on_what_trains(outcome: Outcome) -> None:
    batch, dense = outcome.case.batch, outcome.dense.estimates
    trains = np.repeat(batch["tags"]["sample_mask"], batch["lengths"]) > 0
    chosen = trains & (batch["columns"]["response_mask"] > 0)
    expected = {
        "returns": dense.returns[chosen].mean(),
        "square_returns": np.square(dense.returns[chosen]).mean(),
        "errors": dense.advantages[chosen].mean(),
        "square_errors": np.square(dense.advantages[chosen]).mean(),
    }
    assert outcome.metrics("scores") == pytest.approx(expected, rel=TOLERANCE)


def test_tripwires_measure_a_healthy_critic_in_every_layout(outcome: Outcome) -> None:
    """But for samples that end with what the environment said, as no rollout's do."""
    updates = [leader.update for leader in outcome.leaders]
    measured = {name: metric.value for name, metric in merge(update.measured for update in updates).items()}
    assert measured[Measured.num_updates] == len(LEARNING_RATES)
    assert measured[Measured.learning_rate] == pytest.approx(LEARNING_RATES[-1])
    assert measured[Measured.loss_gradient_error] < 2e-5
    assert measured[Measured.loss_error] < 2e-5
    assert 0 < max(measured[name] for name in (Measured.advantage_error, Measured.return_error)) < 2**-21
    assert measured[Measured.first_value_gap] < 2**-10
    # Beside adapters the embedding is frozen, and its output has no gradient.
    is_frozen = "adapts" in outcome.case.critic
    assert (measured[Measured.first_layer_gradient] > 0) == (not is_frozen)
    assert (measured[Measured.num_first_layers] > 0) == (not is_frozen)
    assert measured[Measured.update_excess] < 1
    never = (
        Measured.optimizer_step_gap,
        Measured.moment_excess,
        Measured.held_gradient,
        Measured.num_still_tensors,
        Measured.num_unequal_copies,
        Measured.betas_gap,
    )
    assert {name: measured[name] for name in never} == dict.fromkeys(never, 0.0), updates[0].named


def test_training_metrics_equal_those_of_the_dense_model(outcome: Outcome) -> None:
    dense = outcome.dense.updates
    values, is_clipped, errors = (
        torch.cat([getattr(update, name) for update in dense]) for name in ("values", "is_clipped", "errors")
    )
    expected = {
        "loss": np.mean([update.loss for update in dense]),
        "grad_norm": np.mean([update.grad_norm for update in dense]),
        "lr": LEARNING_RATES[-1],
        "mean": float(values.mean()),
        "clip_fraction": float(is_clipped.mean()),
        "error": float(errors.mean()),
    }
    assert 0.1 < expected["clip_fraction"] < 0.9
    found = outcome.metrics("update")
    # The mean of the values is near 0.
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=TOLERANCE, abs=1e-6)


def test_weights_after_all_updates_equal_those_of_the_dense_model(outcome: Outcome) -> None:
    assert_same(outcome.tensors("weights"), outcome.dense.weights)


def test_the_gradient_of_the_critic_equals_that_of_the_dense_model(outcome: Outcome) -> None:
    dense = outcome.dense.critic_once
    assert 0.1 < float(dense.is_clipped.mean()) < 0.9
    found = outcome.tensors("critic_gradient")
    trained = {name: found.pop(name) for name in outcome.dense.critic_gradient}
    assert_same(trained, outcome.dense.critic_gradient)
    assert not any(frozen.any() for frozen in found.values())
    metrics = outcome.metrics("critic_update")
    assert metrics["loss"] == pytest.approx(dense.loss, rel=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(dense.grad_norm, rel=TOLERANCE)


def test_the_gradient_of_a_policy_with_advantages_of_tokens_equals_that_of_the_dense_model(
    outcome: Outcome,
) -> None:
    assert_same(outcome.tensors("policy_gradient"), outcome.dense.policy_gradient)
    metrics = outcome.metrics("policy_update")
    assert metrics["loss"] == pytest.approx(outcome.dense.policy_loss, rel=TOLERANCE)
    norm = torch.stack([one.norm() for one in outcome.dense.policy_gradient.values()]).norm()
    assert metrics["grad_norm"] == pytest.approx(float(norm), rel=TOLERANCE)


def test_tripwires_find_the_gradient_of_such_a_policy_as_it_should_be(outcome: Outcome) -> None:
    measured = merge(leader.policy_update.measured for leader in outcome.leaders)
    assert measured[Measured.loss_gradient_error].value < 2e-5
    assert measured[Measured.loss_error].value < 2e-5


def test_each_column_and_sample_is_written_once_and_by_leaders_only(outcome: Outcome) -> None:
    counts = Counter(key for rank in outcome.ranks for key in rank.written)
    assert set(counts.values()) == {1}
    assert len(counts) == 3 * NUM_SAMPLES
    assert {column for column, _ in counts} == {"values", "returns", "token_advantages"}
    for rank in outcome.ranks:
        if not rank.coordinates.is_leader:
            assert (rank.written, rank.scores, rank.update) == ([], None, None)


def test_every_worker_counts_one_version_per_training_phase(outcome: Outcome) -> None:
    assert {rank.version for rank in outcome.ranks} == {1}
    assert {leader.update.version for leader in outcome.leaders} == {1}
