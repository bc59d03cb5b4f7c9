"""An update whose gradient was accumulated in parts is the one that training makes on the whole batch.

Each case trains twice from one state, in real processes over gloo: once on the whole batch, and once after
uneven parts of its first update, in another order than the rows, were scored and accumulated one by one.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import KL_SCALE
from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.driver.stages import with_idle
from nemo_like.policy.batch.policy_columns import scored_columns
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.groups.results import TrainUpdate
from nemo_like.policy.options import PolicyConfig
from nemo_like.tripwires.measured import Measured
from tests.functional.grouped_workers import SharedDataPlane, grouped_workers
from tests.functional.policy_fixtures import (
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
)
from tests.functional.routed_reference import routed_batch
from tests.functional.worlds import WorldPool

UPDATE_SIZE = 16
TEMPERATURE = 0.8
TOLERANCE = 1e-6

PACKED, DYNAMIC = {"micro_batching": MicroBatching.packed}, {"micro_batching": MicroBatching.dynamic}
SHARED = {"micro_batching": MicroBatching.shared}
FSDP = {"backend": "fsdp"}
MIXTURE = {"model_type": "qwen3_moe"}
ADAPTERS = {"adapts": ("all-linear",)}
SEQUENCE_PARALLEL = {"tp": 2, "sequence_parallel": True}
UNTIED = {"tied": False}
RECOMPUTE = {"activation_checkpointing": True}
SAVING = {**RECOMPUTE, "cpu_offload": True}
KL = {"kl_penalty": 0.1}
KL_IN_REWARD = {**KL, "use_kl_in_reward": True}
SAMPLES = {"token_level_loss": False}
GSPO = {**SAMPLES, "kind": "gspo", "entropy_coef": 0.01}
ON_POLICY = {"force_on_policy_ratio": True}


class Interruption(Enum):
    """What drops a part that was accumulated before the others."""

    settling = "settling"
    loading = "loading"


@dataclass(frozen=True)
class AccumulationCase:
    """``options`` are arguments of ``policy_config``; ``parts`` the sizes of the first update's parts."""

    name: str
    options: dict[str, Any]
    loss: dict[str, Any] = field(default_factory=lambda: KL)
    model: dict[str, Any] = field(default_factory=dict)
    parts: tuple[int, ...] = (6, 8, 2)
    num_steps: int = 1
    num_updates: int = 1
    num_epochs: int = 1
    skips_idle: bool = False
    interruption: Interruption | None = None
    fsdp: dict[str, Any] = field(default_factory=dict)
    slow: bool = field(default=False, kw_only=True)

    def config(self, model: Path) -> PolicyConfig:
        cfg = replace(policy_config(model, **self.options), train_global_batch_size=UPDATE_SIZE)
        return replace(cfg, fsdp_cfg=replace(cfg.fsdp_cfg, **self.fsdp))


def case(name: str, options: dict[str, Any], **more: Any) -> AccumulationCase:
    return AccumulationCase(name, options, **more)


ODD = (5, 8, 3)
EP2 = {"ep": 2, "dp": 2}
REPLAY = {"router_replay": True, **PACKED}
SETTLED, LOADED = {"interruption": Interruption.settling}, {"interruption": Interruption.loading}
CASES = [
    case("one process, settled", {}, parts=ODD, **SETTLED),
    case("TP2 with sequence parallelism", {**SEQUENCE_PARALLEL, **PACKED}),
    case("PP2, tied embeddings, mean over samples", {"pp": 2, **PACKED}, loss=GSPO, parts=ODD),
    case("DP2, two updates in each of two steps", {"dp": 2}, num_updates=2, num_steps=2),
    case("EP2", {**EP2, **PACKED}, model=MIXTURE),
    case("FSDP, DP2, settled", {"dp": 2, **FSDP}, **SETTLED),
    case("FSDP, TP2", {"tp": 2, **FSDP, **PACKED}, loss=GSPO, parts=ODD),
    *(
        replace(one, slow=True)
        for one in (
            case("one sample after the other", {"micro_batch_size": 1}, parts=(1,) * UPDATE_SIZE),
            case("in one part", {**DYNAMIC}, parts=(UPDATE_SIZE,)),
            case("weights and optimizer on the host", {"offloads": True, **PACKED}, parts=ODD, **SETTLED),
            case(
                "activation checkpointing, loaded",
                RECOMPUTE,
                parts=ODD,
                num_steps=2,
                **LOADED,
            ),
            case("two epochs of two updates", {}, num_updates=2, num_epochs=2),
            case("adapters", {**ADAPTERS}, num_updates=2),
            case("prompts shared", {**SHARED}, parts=ODD),
            case("on policy", {**PACKED}, loss=ON_POLICY, parts=ODD),
            case("idle samples", {}, loss={}, skips_idle=True),
            case("Dr.GRPO", {}, loss={**SAMPLES, "sequence_length_normalizer": 21}),
            case("KL in the reward", {}, loss=KL_IN_REWARD),
            case("routers that replay", REPLAY, loss=ON_POLICY, model=MIXTURE, **SETTLED),
            case("TP2", {"tp": 2, **ADAPTERS, **SHARED}, parts=ODD, num_steps=2),
            case("TP2 with sequence parallelism, mixture", SEQUENCE_PARALLEL, model=MIXTURE, parts=ODD),
            case("PP2, two steps", {"pp": 2, **DYNAMIC}, parts=ODD, num_updates=2, num_steps=2),
            case(
                "PP2 with two chunks",
                {"pp": 2, "vpp": 2, **PACKED},
                model={"num_hidden_layers": 4},
                parts=ODD,
            ),
            case("PP2, one sample after the other", {"pp": 2}, parts=(1,) * UPDATE_SIZE),
            case("PP2, untied, adapters", {"pp": 2, **ADAPTERS}, model=UNTIED, parts=ODD),
            case("CP2", {"cp": 2, **PACKED}, loss=GSPO, parts=ODD, num_steps=2),
            case("DP2, replicated optimizer", {"dp": 2, "use_distributed_optimizer": False}, num_steps=2),
            case("DP2, loaded", {"dp": 2, "offloads": True, **ADAPTERS}, loss=SAMPLES, num_steps=2, **LOADED),
            case("DP2, prompts shared", {"dp": 2, **SHARED}, num_updates=2, num_epochs=2),
            case("DP2, idle samples", {"dp": 2}, loss={}, skips_idle=True),
            case("EP2, routers that replay", {**EP2, **REPLAY}, model=MIXTURE, num_updates=2, num_steps=2),
            case("EP2, TP2", {"ep": 2, **SEQUENCE_PARALLEL}, model={**MIXTURE, **UNTIED}, parts=ODD),
            case("TP2 x PP2 x DP2", {"pp": 2, "dp": 2, **SEQUENCE_PARALLEL, **PACKED}, num_updates=2),
            case("FSDP, one process", {"offloads": True, **FSDP, **SHARED}, parts=ODD, num_steps=2, **LOADED),
            case("FSDP, mixture", {**FSDP}, model=MIXTURE, parts=ODD),
            case(
                "FSDP, DP2, recomputed and offloaded",
                {"dp": 2, **FSDP, **DYNAMIC},
                fsdp=SAVING,
                num_updates=2,
            ),
            case("FSDP, DP2, adapters", {"dp": 2, **FSDP, **ADAPTERS}, loss=SAMPLES, num_steps=2),
            case("FSDP, TP2 x DP2", {"tp": 2, "dp": 2, **FSDP}, num_updates=2, num_epochs=2),
            case("FSDP, TP2, adapters", {"tp": 2, **FSDP, **ADAPTERS}, parts=ODD, num_steps=2),
        )
    ),
]


@dataclass(frozen=True)
class Trained:
    """What one rank has after a step. ``fetched`` says of which column how many samples were fetched."""

    metrics: dict[str, float]
    measured: dict[str, float]
    weights: dict[str, torch.Tensor]
    planned_counts: Any
    fetched: Counter[str]


@dataclass(frozen=True)
class BothWays:
    """One rank's steps, with the whole batch at once and with the first update in parts."""

    at_once: list[Trained]
    in_parts: list[Trained]

    @property
    def steps(self) -> Iterator[tuple[Trained, Trained]]:
        return zip(self.at_once, self.in_parts, strict=True)


Work = tuple[AccumulationCase, PolicyConfig, LossConfig, dict[str, Any]]


def train_both_ways(coordinates: Coordinates, work: list[Work], path: Path) -> list[BothWays]:
    """One rank: all cases of a layout, each with policies of its own."""
    return [
        BothWays(
            Run(coordinates, of_case, path / f"{number}").steps(),
            InParts(coordinates, of_case, path / f"{number}").steps(),
        )
        for number, of_case in enumerate(work)
    ]


class Run:
    """The steps of one policy, each on the same samples, with the whole batch at once."""

    def __init__(self, coordinates: Coordinates, work: Work, path: Path) -> None:
        self.case, cfg, self.loss, self._batch = work
        self.coordinates, self.path = coordinates, path
        self.plane = SharedDataPlane()
        self.group, self._worker = grouped_workers(
            coordinates,
            cfg,
            self.loss,
            self.plane,
            temperature=TEMPERATURE,
            num_epochs=self.case.num_epochs,
        )
        self._columns = scored_columns(self.loss)

    def steps(self) -> list[Trained]:
        return [self._step(number) for number in range(self.case.num_steps)]

    def train(self, batch: KVBatchMeta) -> TrainUpdate:
        return self.group.train(self.scored(batch))

    def scored(self, batch: KVBatchMeta) -> KVBatchMeta:
        if not self._columns:
            return batch
        scored = self.group.compute_logprobs(batch, self._columns).batch
        return scored.with_tag(KL_SCALE, [0.5] * len(batch)) if self.loss.use_kl_in_reward else scored

    def interrupt(self, batch: KVBatchMeta) -> None:
        """Nothing is under way before a step."""

    def _step(self, number: int) -> Trained:
        if number == self.case.num_steps - 1:
            self.interrupt(put_samples(self.plane, f"abandoned-{number}", self._batch))
        batch = put_samples(self.plane, f"train-{number}", self._batch)
        self.plane.fetched.clear()
        update = self.train(with_idle(batch, self.loss) if self.case.skips_idle else batch)
        return Trained(
            {name: metric.value for name, metric in update.metrics.items()},
            {name: metric.value for name, metric in update.measured.items()},
            {name: weight.clone() for name, weight in self._worker._backend.stage_weights()},
            update.planned_counts,
            self.plane.fetched.copy(),
        )


class InParts(Run):
    """The same with the first update in parts, in another order than the rows."""

    def train(self, batch: KVBatchMeta) -> TrainUpdate:
        order = np.random.default_rng(3).permutation(UPDATE_SIZE).tolist()
        ends = np.cumsum(self.case.parts).tolist()
        parts = []
        for size, end in zip(self.case.parts, ends, strict=True):
            parts.append(self.scored(batch.subset(order[end - size : end])))
            self.group.accumulate(parts[-1])
        if len(batch) > UPDATE_SIZE:
            parts.append(self.scored(batch.slice(UPDATE_SIZE, len(batch))))
        whole = KVBatchMeta.concat(parts)
        place = {sample: number for number, sample in enumerate(whole.sample_ids)}
        whole = whole.subset([place[sample] for sample in batch.sample_ids])
        return self.group.train(whole, num_accumulated=UPDATE_SIZE)

    def interrupt(self, batch: KVBatchMeta) -> None:
        """Have some samples of another partition accumulated and dropped."""
        if self.case.interruption is None:
            return
        if self.case.interruption is Interruption.loading:
            self.group.save_checkpoint(str(self._empty_directory()), CheckpointWriting.blocking)
        self.group.accumulate(self.scored(batch.slice(4, 12)))
        if self.case.interruption is Interruption.loading:
            self.group.load_checkpoint(str(self.path), self.group.version)
        else:
            assert self.group.settle() == self.group.version

    def _empty_directory(self) -> Path:
        if self.coordinates.rank == 0:
            shutil.rmtree(self.path, ignore_errors=True)
            self.path.mkdir(parents=True)
        dist.barrier()
        return self.path


class Worlds:
    """What cases gave; the first case of a layout runs all of them, the slow ones apart."""

    def __init__(self, path: Path) -> None:
        self._path, self._pool = path, WorldPool()
        self._outcomes: dict[str, list[BothWays]] = {}

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.close()

    def outcome(self, case: AccumulationCase) -> list[BothWays]:
        """By rank."""
        if case.name not in self._outcomes:
            layout = parallel_layout(case.config(Path("unused")))
            self._run([one for one in CASES if self._is_alike(one, case)], layout)
        return self._outcomes[case.name]

    @staticmethod
    def _is_alike(one: AccumulationCase, other: AccumulationCase) -> bool:
        layouts = {parallel_layout(case.config(Path("unused"))) for case in (one, other)}
        return len(layouts) == 1 and one.slow == other.slow

    def _run(self, cases: list[AccumulationCase], layout: Any) -> None:
        work = [
            (case, case.config(self._model(case)), loss_config(**case.loss), samples(case)) for case in cases
        ]
        path = self._path / "checkpoints" / f"{len(self._outcomes)}"
        ranks = self._pool.run(train_both_ways, layout, work, path, timeout_s=500.0)
        for case, of_case in zip(cases, zip(*ranks, strict=True), strict=True):
            self._outcomes[case.name] = list(of_case)

    def _model(self, case: AccumulationCase) -> Path:
        path = self._path / ("-".join(map(str, case.model.values())) or "dense")
        return path if path.is_dir() else make_checkpoint(path, **case.model)


def samples(case: AccumulationCase) -> dict[str, Any]:
    """Samples of which every fifth is masked; some have no advantage where idle ones are skipped."""
    make = routed_batch if case.options.get("router_replay") else random_batch
    batch = make(case.num_updates * UPDATE_SIZE)
    if case.skips_idle:
        for row in range(0, UPDATE_SIZE, 2):
            batch["tags"]["advantage"][row] = 0.0
    return batch


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    with Worlds(tmp_path_factory.mktemp("accumulation")) as worlds:
        yield worlds


@pytest.fixture(
    scope="module",
    params=[pytest.param(case, marks=pytest.mark.slow) if case.slow else case for case in CASES],
    ids=lambda case: case.name,
)
def outcome(request: pytest.FixtureRequest, worlds: Worlds) -> list[BothWays]:
    return worlds.outcome(request.param)


def test_weights_after_each_step_are_the_same(outcome: list[BothWays]) -> None:
    for rank in outcome:
        for at_once, in_parts in rank.steps:
            assert in_parts.weights.keys() == at_once.weights.keys()
            for name, weight in in_parts.weights.items():
                difference = float((weight - at_once.weights[name]).abs().max())
                assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


def test_metrics_are_the_same(outcome: list[BothWays]) -> None:
    for rank in outcome:
        for at_once, in_parts in rank.steps:
            assert in_parts.metrics.keys() == at_once.metrics.keys()
            for name, value in in_parts.metrics.items():
                if name == "num_skipped_samples":
                    # Every part keeps a sample per rank, and equally many on all ranks.
                    assert 0 <= value <= at_once.metrics[name]
                    continue
                # The ratio of a single token has the rounding of its log-prob, which is some nats.
                tolerance = 5 * TOLERANCE if name.endswith(("_min", "_max")) else TOLERANCE
                expected = pytest.approx(at_once.metrics[name], rel=tolerance, abs=tolerance)
                assert value == expected, name


def test_the_watch_sees_the_losses_of_the_whole_update(outcome: list[BothWays]) -> None:
    for rank in outcome:
        for at_once, in_parts in rank.steps:
            found, expected = in_parts.measured, at_once.measured
            assert found.keys() == expected.keys()
            assert found[Measured.loss_gradient_error] < 2e-5
            assert found[Measured.loss_error] < 2e-5
            assert found[Measured.num_trained_tokens] >= expected[Measured.num_trained_tokens]
            for name in (Measured.num_updates, Measured.num_wrong_samples):
                assert found[name] == expected[name]
            assert in_parts.planned_counts == at_once.planned_counts


def test_no_column_of_a_part_is_fetched_twice(outcome: list[BothWays]) -> None:
    """Whole updates after it are fetched as always."""
    if len(outcome[0].in_parts[0].planned_counts[0]) == 1:
        for rank in outcome:
            for at_once, in_parts in rank.steps:
                assert in_parts.fetched == at_once.fetched
