"""Every parallel layout computes what a dense Hugging Face model with torch.optim does.

Each case runs the phases of one step, three optimizer updates, in real processes over gloo, and is
looked at from several sides. The processes stay for all cases, and a world for all cases of a layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import ENTROPIES
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.batch.policy_columns import scored_columns
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.groups.results import WorkerScores, WorkerUpdate
from nemo_like.policy.megatron.expert_load import load_metrics
from nemo_like.policy.options import PolicyConfig, ReferencePlacement, ReplicaFetch
from nemo_like.tripwires.measured import Measured
from tests.functional.dense_reference import DenseReference, DenseUpdate
from tests.functional.policy_fixtures import (
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import WorldPool

NUM_SAMPLES, GLOBAL_BATCH_SIZE = 24, 8
TEMPERATURE = 0.8
# Two updates of warm-up to 2e-3, then linear from update 2 towards 1e-4 at update 6.
LEARNING_RATES = (1e-3, 2e-3, 2e-3 - 1.9e-3 / 4)
TOLERANCE = 1e-5
CANARY = (5, 60, 7, 33, 2, 90, 41, 8)


PACKED, DYNAMIC = {"micro_batching": MicroBatching.packed}, {"micro_batching": MicroBatching.dynamic}
SHARED = {"micro_batching": MicroBatching.shared}
UNTIED = {"tied": False}
ADAPTERS = {"adapts": ("all-linear",)}
SOME_ADAPTERS = {"adapts": ("q_proj", "v_proj", "up_proj", "down_proj")}
ATTENTION_ADAPTERS = {"adapts": ("q_proj", "k_proj", "v_proj", "o_proj")}
EXPERT_ADAPTERS = {"adapts": ("q_proj", "gate_proj", "up_proj", "down_proj")}
MIXTURE = {"model_type": "qwen3_moe"}
FOUR_LAYERS = {"num_hidden_layers": 4}
KL = {"kl_penalty": 0.1}
# GSPO looks at whole samples, which ranks may share; the entropy at whole distributions, likewise.
GSPO = {"kind": "gspo", "token_level_loss": False, "entropy_coef": 0.01}


@dataclass(frozen=True)
class Case:
    """``layout`` and ``options`` are arguments of ``policy_config``."""

    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=lambda: KL)
    slow: bool = field(default=False, kw_only=True)  # left to `make test-all`

    def config(self, model: Path) -> PolicyConfig:
        return policy_config(model, **self.layout, **self.options)

    @property
    def parallel_layout(self) -> ParallelLayout:
        return parallel_layout(self.config(Path("unused")))


def variants(
    name: str,
    layout: dict[str, Any],
    model: dict[str, Any] | None = None,
    *,
    quick: Sequence[str] = ("prompts shared", "packed"),
) -> list[Case]:
    """A layout with every way to make micro-batches, of which all but ``quick`` are slow."""
    ways: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "prompts shared": (SHARED, GSPO),
        "micro-batches of four": ({}, KL),
        "micro-batches of one": ({"micro_batch_size": 1}, KL),
        "packed": (PACKED, GSPO),
        "dynamic": (DYNAMIC, KL),
    }
    if "cp" in layout:  # it cuts a row of samples, not one that they share
        del ways["prompts shared"]
    return [
        Case(f"{name}, {way}", layout, options, model or {}, loss, slow=way not in quick)
        for way, (options, loss) in ways.items()
    ]


def as_params(cases: Sequence[Case]) -> list[Any]:
    """Parameters of a fixture, the slow ones marked."""
    return [pytest.param(case, marks=pytest.mark.slow) if case.slow else case for case in cases]


SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
CASES = [
    *variants("one process", {}, quick=["prompts shared", "micro-batches of one"]),
    Case("activation checkpointing", {}, {"activation_checkpointing": True, **PACKED}, slow=True),
    Case("reference kept on the host", {}, {"reference_placement": ReferencePlacement.host_copy, **DYNAMIC}),
    Case("weights and optimizer on the host between phases", {}, {"offloads": True, **PACKED}),
    Case(
        "prompts shared, activation checkpointing",
        {},
        {"activation_checkpointing": True, **SHARED},
        slow=True,
    ),
    Case("mixture of experts", {}, PACKED, MIXTURE),
    Case("adapters", {}, ADAPTERS),
    Case("adapters, weights on the host between phases", {}, {"offloads": True, **ADAPTERS}, slow=True),
    Case(
        "adapters, activation checkpointing",
        {},
        {"activation_checkpointing": True, **ADAPTERS, **PACKED},
        slow=True,
    ),
    *variants("TP2 with sequence parallelism", SEQUENCE_PARALLEL),
    Case("experts on every TP rank", SEQUENCE_PARALLEL, {}, MIXTURE),
    Case("adapters, TP2 with sequence parallelism", SEQUENCE_PARALLEL, {**ADAPTERS, **PACKED}),
    Case("some adapters, TP2 with sequence parallelism", SEQUENCE_PARALLEL, SOME_ADAPTERS, slow=True),
    Case("experts in one matrix product", {}, {"moe_grouped_gemm": True, **PACKED}, MIXTURE),
    Case(
        "experts on every TP rank, in one matrix product",
        SEQUENCE_PARALLEL,
        {"moe_grouped_gemm": True},
        MIXTURE,
        slow=True,
    ),
    Case("TP2", {"tp": 2}),
    Case("adapters, TP2", {"tp": 2}, ADAPTERS, slow=True),
    Case("some adapters, TP2", {"tp": 2}, {**SOME_ADAPTERS, **SHARED}),
    Case("vocabulary that the ranks cannot share evenly", {"tp": 2}, {}, {"vocab_size": 97, **UNTIED}, GSPO),
    Case("Llama in several files", {"tp": 2}, {}, {"model_type": "llama", "shard_size": "80KB", **UNTIED}),
    Case("every rank fetches", {"tp": 2}, {"replica_fetch": ReplicaFetch.every_rank}),
    *variants("PP2", {"pp": 2}, quick=["packed", "dynamic"]),
    Case("uneven stages", {"pp": 2, "end_stages": (1, None)}, PACKED, {"num_hidden_layers": 3}),
    Case(
        "uneven stages of a mixture, frozen routers",
        {"pp": 2, "end_stages": (None, 1)},
        {"freezes_routers": True, **DYNAMIC},
        {**MIXTURE, "num_hidden_layers": 3},
    ),
    Case(
        "four stages, the outer ones short",
        {"pp": 4, "end_stages": (1, 1)},
        PACKED,
        {"num_hidden_layers": 6, **UNTIED},
        slow=True,
    ),
    *variants("PP2 with two chunks", {"pp": 2, "vpp": 2}, FOUR_LAYERS, quick=["packed"]),
    Case(
        "adapters, PP2 with two chunks",
        {"pp": 2, "vpp": 2},
        {"activation_checkpointing": True, **ADAPTERS, **PACKED},
        FOUR_LAYERS,
    ),
    Case(
        "experts, PP2 with two chunks, untied",
        {"pp": 2, "vpp": 2},
        PACKED,
        {**MIXTURE, **FOUR_LAYERS, **UNTIED},
    ),
    Case("PP2 with two chunks, CP2", {"pp": 2, "vpp": 2, "cp": 2}, PACKED, FOUR_LAYERS, slow=True),
    Case("PP4 with two chunks", {"pp": 4, "vpp": 2}, PACKED, {"num_hidden_layers": 8}, slow=True),
    Case(
        "experts, PP2 with two chunks, TP2, EP2",
        {"pp": 2, "vpp": 2, "ep": 2, **SEQUENCE_PARALLEL},
        {"activation_checkpointing": True, **DYNAMIC},
        {**MIXTURE, **FOUR_LAYERS},
        slow=True,
    ),
    Case(
        "PP2 with two chunks, DP2, weights and optimizer on the host between phases",
        {"pp": 2, "vpp": 2, "dp": 2},
        {"offloads": True, **PACKED},
        FOUR_LAYERS,
        slow=True,
    ),
    Case("micro-batches of three, the last one smaller", {"pp": 2}, {"micro_batch_size": 3}),
    Case("adapters, PP2", {"pp": 2}, {"activation_checkpointing": True, **ADAPTERS, **SHARED}),
    *variants("CP2", {"cp": 2}),
    Case("adapters, CP2", {"cp": 2}, {**ADAPTERS, **PACKED}, slow=True),
    Case(
        "CP2, activation checkpointing",
        {"cp": 2},
        {"activation_checkpointing": True, **PACKED},
        slow=True,
    ),
    *variants("DP2", {"dp": 2}, quick=["dynamic"]),
    Case("replicated optimizer", {"dp": 2}, {"use_distributed_optimizer": False}),
    Case("adapters, DP2", {"dp": 2}, {**ADAPTERS, **DYNAMIC}, slow=True),
    Case(
        "adapters, replicated optimizer",
        {"dp": 2},
        {"use_distributed_optimizer": False, **ADAPTERS},
        slow=True,
    ),
    Case("sequence-level loss", {"dp": 2}, {}, {}, {"token_level_loss": False}),
    *variants("EP2", {"ep": 2, "dp": 2}, MIXTURE),
    Case(
        "adapters of attention beside experts, EP2",
        {"ep": 2, "dp": 2},
        ATTENTION_ADAPTERS,
        MIXTURE,
        slow=True,
    ),
    Case("adapters of experts", {}, {**EXPERT_ADAPTERS, **PACKED}, MIXTURE),
    *(
        Case(f"adapters of experts, {name}", layout, {**EXPERT_ADAPTERS, **options}, MIXTURE, slow=True)
        for name, layout, options in (
            ("recomputed", {}, {"activation_checkpointing": True, **DYNAMIC}),
            ("in one matrix product", {}, {"moe_grouped_gemm": True, **PACKED}),
            ("on every TP rank", SEQUENCE_PARALLEL, PACKED),
            ("PP2", {"pp": 2}, PACKED),
            ("EP2", {"ep": 2, "dp": 2}, PACKED),
            ("EP2, replicated optimizer", {"ep": 2, "dp": 2}, {"use_distributed_optimizer": False}),
            ("EP2, in one matrix product", {"ep": 2, "dp": 2}, {"moe_grouped_gemm": True, **PACKED}),
            ("EP2 with TP2", {"ep": 2, **SEQUENCE_PARALLEL}, {}),
            ("EP4 over TP2 and DP2", {"ep": 4, "dp": 2, **SEQUENCE_PARALLEL}, PACKED),
            ("divided over TP2", {"etp": 2, **SEQUENCE_PARALLEL}, PACKED),
            ("divided over TP2, DP2", {"etp": 2, "dp": 2, **SEQUENCE_PARALLEL}, {}),
        )
    ),
    Case(
        "adapters of experts after a dense layer and beside shared ones, EP2",
        {"ep": 2, "dp": 2},
        {**EXPERT_ADAPTERS, **PACKED},
        {"model_type": "glm4_moe", **UNTIED},
        slow=True,
    ),
    Case(
        "adapters of gpt-oss's experts, EP2, in one matrix product",
        {"ep": 2, "dp": 2},
        {"moe_grouped_gemm": True, **EXPERT_ADAPTERS, **PACKED},
        {"model_type": "gpt_oss", **UNTIED},
        slow=True,
    ),
    Case(
        "adapters of some of Mixtral's experts' layers, EP2",
        {"ep": 2, "dp": 2},
        {"adapts": ("k_proj", "w2")},
        {"model_type": "mixtral"},
        slow=True,
    ),
    Case(
        "EP2, experts in one matrix product",
        {"ep": 2, "dp": 2},
        {"moe_grouped_gemm": True, **PACKED},
        MIXTURE,
        slow=True,
    ),
    Case("EP2 with TP2, untied", {"ep": 2, **SEQUENCE_PARALLEL}, {}, {**MIXTURE, **UNTIED}),
    Case("experts divided over TP2", {"etp": 2, **SEQUENCE_PARALLEL}, PACKED, MIXTURE),
    Case("experts divided over TP2, DP2", {"etp": 2, "dp": 2, **SEQUENCE_PARALLEL}, {}, MIXTURE, slow=True),
    Case(
        "experts divided over TP2, PP2", {"etp": 2, "pp": 2, **SEQUENCE_PARALLEL}, PACKED, MIXTURE, slow=True
    ),
    *variants("TP2 x PP2", {"tp": 2, "pp": 2}, quick=()),
    Case("untied embeddings", {"tp": 2, "pp": 2}, PACKED, UNTIED, slow=True),
    Case("prompts shared, Qwen2", {"tp": 2, "pp": 2}, SHARED, {"model_type": "qwen2"}, slow=True),
    Case("Qwen2 with attention biases", {"tp": 2, "pp": 2}, {}, {"model_type": "qwen2"}),
    Case("adapters, Qwen2", {"tp": 2, "pp": 2}, ADAPTERS, {"model_type": "qwen2", **UNTIED}, slow=True),
    *variants("TP2 x DP2", {"tp": 2, "dp": 2}, quick=()),
    Case("EP4 over TP2 and DP2", {"ep": 4, "dp": 2, **SEQUENCE_PARALLEL}, PACKED, MIXTURE, slow=True),
    Case("EP2 x PP2", {"ep": 2, "dp": 2, "pp": 2}, DYNAMIC, MIXTURE, slow=True),
    Case("CP2 x TP2", {"cp": 2, **SEQUENCE_PARALLEL}, PACKED, {}, GSPO, slow=True),
    # In eight processes.
    *variants("TP2 x PP2 x DP2", {"tp": 2, "pp": 2, "dp": 2}, quick=()),
    Case("adapters, TP2 x PP2 x DP2", {"tp": 2, "pp": 2, "dp": 2}, {**ADAPTERS, **PACKED}, slow=True),
    *variants("TP2 x CP2 x DP2", {"cp": 2, "dp": 2, **SEQUENCE_PARALLEL}, quick=()),
    *variants(
        "EP4 over TP2 and DP2, PP2", {"ep": 4, "dp": 2, "pp": 2, **SEQUENCE_PARALLEL}, MIXTURE, quick=()
    ),
]


class CountingDataPlane(InMemoryDataPlane):
    """Records every (column, sample) that is written to it, and every fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str]] = []
        self.num_fetches = 0

    def write(self, meta: KVBatchMeta, columns: Any) -> KVBatchMeta:
        self.written += [(name, sample) for name in columns for sample in meta.sample_ids]
        return super().write(meta, columns)

    def fetch(self, meta: KVBatchMeta, columns: Any) -> dict[str, Any]:
        self.num_fetches += 1
        return super().fetch(meta, columns)


@dataclass(frozen=True)
class RankReport:
    """What one rank of a world saw. ``logprobs`` and ``entropies`` are its shard's, None when it does not
    lead."""

    coordinates: Coordinates
    positions: list[int]
    logprobs: list[torch.Tensor] | None
    entropies: list[torch.Tensor] | None
    scores: WorkerScores | None
    update: WorkerUpdate | None
    written: list[tuple[str, str]]
    num_fetches: int
    policy_version: int
    canary: list[float]  # after training


@dataclass(frozen=True)
class Step:
    """What one case runs, and where its weights go."""

    cfg: PolicyConfig
    loss: LossConfig
    batch: dict[str, Any]
    export: str


def run_steps(coordinates: Coordinates, steps: list[Step]) -> list[RankReport]:
    """One rank: steps of one layout, each with a policy of its own."""
    reports = []
    for step in steps:
        reports.append(run_step(coordinates, step))
    return reports


def run_step(coordinates: Coordinates, step: Step) -> RankReport:
    """One rank: the phases of a step, whose rollouts are dumped, by the worker's own methods, and the export
    of its weights."""
    cfg, loss, batch = step.cfg, step.loss, step.batch
    plane = CountingDataPlane()
    meta = put_samples(plane, "step", batch)
    worker = ready_worker(
        cfg, loss, coordinates, plane, TEMPERATURE, further_inputs=batch.get("further_inputs", ())
    )
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": GLOBAL_BATCH_SIZE}
    scoring = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)[coordinates.dp]
    scores = worker.compute_logprobs(scoring, (*scored_columns(loss), ENTROPIES))
    num_fetches = plane.num_fetches
    logprobs, entropies = None, None
    if coordinates.is_leader:
        logprobs, entropies = (
            list(torch.from_numpy(packed.copy()).split(list(scoring.lengths)))
            for packed in plane.fetch(scoring, ["prev_logprobs", "entropies"]).values()
        )
    if cfg.replica_fetch is ReplicaFetch.every_rank:
        share_written(coordinates, plane, scoring)
    training = shard_for_training(meta, strategy=train_strategy(cfg), **sizes)[coordinates.dp]
    update = worker.train(training)
    canary = worker.canary_logprobs(CANARY)
    worker.export_hf(step.export)
    positions = [meta.sample_ids.index(sample) for sample in scoring.sample_ids]
    return RankReport(
        coordinates,
        positions,
        logprobs,
        entropies,
        scores,
        update,
        plane.written,
        num_fetches,
        worker.version,
        canary,
    )


def share_written(coordinates: Coordinates, plane: InMemoryDataPlane, meta: KVBatchMeta) -> None:
    """What the leader wrote, on the other ranks' planes too, as if all had the same one. One replica."""
    names = ["prev_logprobs", "reference_logprobs"]
    columns = [plane.fetch(meta, names) if coordinates.is_leader else None]
    dist.broadcast_object_list(columns, src=0)
    if not coordinates.is_leader and columns[0] is not None:
        InMemoryDataPlane.write(plane, meta, columns[0])


@dataclass(frozen=True)
class DenseRun:
    logprobs: list[torch.Tensor]
    entropies: list[torch.Tensor]
    updates: list[DenseUpdate]
    weights: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """A case's world beside its dense reference."""

    case: Case
    batch: dict[str, Any]
    ranks: list[RankReport]
    exported: dict[str, torch.Tensor]
    dense: DenseRun
    export: Path
    loader: Any  # transformers' class that loads the model

    @property
    def leaders(self) -> list[RankReport]:
        return [rank for rank in self.ranks if rank.coordinates.is_leader]

    def metrics(self, phase: str) -> dict[str, Metric]:
        return merge(getattr(leader, phase).metrics for leader in self.leaders)


class Matrix:
    """Outcomes of cases, those of one layout from one world; no reference is computed twice."""

    reference: type[DenseReference] = DenseReference
    make_checkpoint = staticmethod(make_checkpoint)

    @staticmethod
    def make_batch() -> dict[str, Any]:
        return random_batch(NUM_SAMPLES)

    def __init__(self, cases: Sequence[Case], path: Path) -> None:
        self._cases, self._path, self._pool = cases, path, WorldPool()
        self._outcomes: dict[str, Outcome] = {}
        self._dense: dict[str, DenseRun] = {}

    def __enter__(self) -> Matrix:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def outcome(self, case: Case) -> Outcome:
        """The first case of a layout runs all of them, the slow ones apart."""
        if case.name not in self._outcomes:
            alike = (case.parallel_layout, case.slow)
            self._run([other for other in self._cases if (other.parallel_layout, other.slow) == alike])
        return self._outcomes[case.name]

    def _run(self, cases: Sequence[Case]) -> None:
        batch = self.make_batch()
        steps = [
            Step(case.config(self.model(case)), loss_config(**case.loss), batch, str(self._export(case)))
            for case in cases
        ]
        reports = self._pool.run(run_steps, cases[0].parallel_layout, steps, timeout_s=300.0)
        for case, step, ranks in zip(cases, steps, zip(*reports, strict=True), strict=True):
            self._outcomes[case.name] = Outcome(
                case,
                batch,
                list(ranks),
                self._exported(case),
                self._dense_run(case, step),
                self._export(case),
                self.reference.loader,
            )

    def model(self, case: Case) -> Path:
        path = self._path / "models" / slug(case.model)
        return path if path.is_dir() else self.make_checkpoint(path, **case.model)

    def _export(self, case: Case) -> Path:
        return self._path / "exports" / slug(case.name)

    def _exported(self, case: Case) -> dict[str, torch.Tensor]:
        model = self.reference.loader.from_pretrained(self._export(case), dtype=torch.float32)
        return dict(model.state_dict())

    def _dense_run(self, case: Case, step: Step) -> DenseRun:
        frozen = (step.cfg.freeze_vision_tower, step.cfg.megatron_cfg.freeze_moe_router)
        key = slug((case.model, case.loss, step.cfg.lora, step.cfg.optimizer.kind, *frozen))
        if key not in self._dense:
            self._dense[key] = dense_run(step, self.reference)
        return self._dense[key]


def slug(value: object) -> str:
    return re.sub(r"\W+", "-", str(value))


def dense_run(step: Step, kind: type[DenseReference] = DenseReference) -> DenseRun:
    """The same step without any parallelism."""
    dense = kind(step.cfg, step.loss, TEMPERATURE)
    prev = [logprobs.detach() for logprobs in dense.logprobs(step.batch)]
    entropies = [entropy.detach() for entropy in dense.entropies(step.batch)]
    has_reference = step.loss.reference_policy_kl_penalty > 0
    reference = dense.reference_logprobs(step.batch) if has_reference else None
    updates = [
        dense.update(step.batch, list(range(first, first + GLOBAL_BATCH_SIZE)), prev, reference, rate)
        for first, rate in zip(range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE), LEARNING_RATES, strict=True)
    ]
    return DenseRun(prev, entropies, updates, dense.weights(), dense.adapters())


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(CASES, tmp_path_factory.mktemp("policy")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


def test_logprobs_equal_the_dense_model(outcome: Outcome) -> None:
    for leader in outcome.leaders:
        for position, logprobs in zip(leader.positions, leader.logprobs, strict=True):
            torch.testing.assert_close(logprobs, outcome.dense.logprobs[position], rtol=0, atol=TOLERANCE)
    assert sorted(position for leader in outcome.leaders for position in leader.positions) == list(
        range(NUM_SAMPLES)
    )


def test_entropies_equal_the_dense_model(outcome: Outcome) -> None:
    for leader in outcome.leaders:
        for position, entropies in zip(leader.positions, leader.entropies, strict=True):
            torch.testing.assert_close(entropies, outcome.dense.entropies[position], rtol=0, atol=TOLERANCE)


def test_tripwires_measure_a_healthy_step_in_every_layout(outcome: Outcome) -> None:
    measured = {
        name: metric.value for name, metric in merge(one.update.measured for one in outcome.leaders).items()
    }
    dense = outcome.dense.updates
    assert measured[Measured.num_trained_tokens] == sum(update.num_tokens for update in dense)
    assert measured[Measured.loss_gradient_error] < 2e-5
    assert measured[Measured.loss_error] < 2e-5
    assert measured[Measured.first_ratio_gap] < TOLERANCE
    assert measured[Measured.num_updates] == len(dense)
    assert measured[Measured.learning_rate] == pytest.approx(LEARNING_RATES[-1])
    assert 0 < measured[Measured.weights_moved] < 2 * sum(LEARNING_RATES)
    never = (
        Measured.num_wrong_samples,
        Measured.has_policy_as_reference,
        Measured.optimizer_step_gap,
        Measured.moment_excess,
        Measured.weights_moved_elsewhere,
        Measured.reference_moved,
        Measured.num_wrong_advantages,
        Measured.num_odd_entropies,
        Measured.held_gradient,
        Measured.num_wrong_updates,
        Measured.num_still_tensors,
        Measured.betas_gap,
        Measured.eps_gap,
        Measured.weight_decay_gap,
        Measured.num_unequal_copies,
    )
    assert measured[Measured.update_excess] < 1
    assert {name: measured[name] for name in never} == dict.fromkeys(never, 0.0)


def test_the_canary_is_scored_by_the_trained_weights_at_temperature_1(outcome: Outcome) -> None:
    model = outcome.loader.from_pretrained(outcome.export, dtype=torch.float32)
    with torch.no_grad():
        logprobs = model(torch.tensor([CANARY])).logits[0, :-1].log_softmax(-1)
    expected = logprobs.gather(1, torch.tensor(CANARY[1:])[:, None])[:, 0]
    for rank in outcome.ranks:
        assert rank.canary == pytest.approx(expected.tolist(), abs=TOLERANCE)


def test_training_metrics_equal_the_dense_model(outcome: Outcome) -> None:
    dense = outcome.dense.updates
    num_tokens = sum(update.num_tokens for update in dense)
    ratios, clipped, low, high, kl, entropy = (
        torch.cat([getattr(update, name) for update in dense])
        for name in ("ratio", "clipped_ratio", "held_low", "held_high", "kl", "entropy")
    )
    expected = {
        "loss": np.mean([update.loss for update in dense]),
        "grad_norm": np.mean([update.grad_norm for update in dense]),
        "lr": LEARNING_RATES[-1],
        "probs_ratio": ratios.sum() / num_tokens,
        "probs_ratio_clamped": clipped.sum() / num_tokens,
        "clip_fraction_low": low.sum() / num_tokens,
        "clip_fraction_high": high.sum() / num_tokens,
        "kl_penalty": kl.sum() / num_tokens,
        "probs_ratio_max": ratios.max(),
        "probs_ratio_min": ratios.min(),
        "probs_ratio_clamped_max": clipped.max(),
        "probs_ratio_clamped_min": clipped.min(),
    }
    if "entropy_coef" in outcome.case.loss:
        expected["entropy"] = entropy.sum() / num_tokens
    choices = [update.choices for update in dense if update.choices is not None]
    if choices and outcome.case.config(Path("unused")).backend == "megatron":  # which alone counts them
        sums = torch.stack(choices).sum(dim=0)
        expected |= load_metrics(sums[:, :-1], sums[:, -1], num_chosen=2)
    metrics = {name: metric.value for name, metric in outcome.metrics("update").items()}
    assert metrics == pytest.approx(
        {name: float(value) for name, value in expected.items()}, abs=TOLERANCE, rel=TOLERANCE
    )


def test_exported_weights_equal_the_dense_model_after_its_updates(outcome: Outcome) -> None:
    assert outcome.exported.keys() == outcome.dense.weights.keys()
    for name, weight in outcome.exported.items():
        difference = (weight - outcome.dense.weights[name]).abs().max()
        assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


def test_exported_adapters_equal_those_of_peft_after_its_updates(outcome: Outcome) -> None:
    path = outcome.export / "adapter"
    assert path.is_dir() is bool(outcome.dense.adapters)
    if path.is_dir():
        exported = load_file(path / "adapter_model.safetensors")
        torch.testing.assert_close(exported, outcome.dense.adapters, rtol=0, atol=TOLERANCE)


def test_mismatch_tags_compare_with_the_generation_logprobs_sample_by_sample(outcome: Outcome) -> None:
    lengths, columns = outcome.batch["lengths"], outcome.batch["columns"]
    generation = torch.from_numpy(columns["generation_logprobs"]).split(lengths)
    for leader in outcome.leaders:
        errors = leader.scores.tags["mult_prob_error"]
        for position, error in zip(leader.positions, errors, strict=True):
            gap = (generation[position] - outcome.dense.logprobs[position])[3:].abs()
            assert error == pytest.approx(float(gap.exp().mean()), rel=1e-4)


def test_mismatch_metrics_weigh_every_trained_token_alike(outcome: Outcome) -> None:
    lengths, columns = outcome.batch["lengths"], outcome.batch["columns"]
    generation = torch.from_numpy(columns["generation_logprobs"]).split(lengths)
    trained = [row for row, mask in enumerate(outcome.batch["tags"]["sample_mask"]) if mask]
    ratio = torch.cat([(outcome.dense.logprobs[row] - generation[row])[3:] for row in trained]).exp()
    metric = outcome.metrics("scores")["sampling_importance_ratio"]
    assert metric.weight == len(ratio)
    assert metric.value == pytest.approx(float(ratio.mean()), rel=1e-4)


def test_each_column_and_sample_is_written_once_and_by_leaders_only(outcome: Outcome) -> None:
    columns = ["prev_logprobs", "entropies"]
    columns += ["reference_logprobs"] if outcome.case.loss.get("kl_penalty") else []
    counts = Counter(key for rank in outcome.ranks for key in rank.written)
    assert set(counts.values()) == {1}
    assert len(counts) == len(columns) * NUM_SAMPLES
    assert {column for column, _ in counts} == set(columns)
    everyone_fetches = outcome.case.options.get("replica_fetch") is ReplicaFetch.every_rank
    for rank in outcome.ranks:
        leads = rank.coordinates.is_leader
        assert rank.num_fetches == (1 if leads or everyone_fetches else 0)
        if not leads:
            assert (rank.written, rank.scores, rank.update) == ([], None, None)


def test_every_worker_counts_one_policy_version_per_training_phase(outcome: Outcome) -> None:
    assert {rank.policy_version for rank in outcome.ranks} == {1}
    assert {leader.update.version for leader in outcome.leaders} == {1}
