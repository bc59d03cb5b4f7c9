"""A teacher's columns as each kind of teacher writes them, and as a dense model gives them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    INPUT_IDS,
    RESPONSE_MASK,
    TEACHER_LOGPROBS,
    Column,
    reads,
    teacher_topk_columns,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.configuration import load_config
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.interface import ColumnData
from nemo_like.policy.backends.interface import WorkerConnections
from nemo_like.policy.groups.group import TeacherWorkerGroup
from nemo_like.policy.groups.results import WorkerScores
from nemo_like.policy.groups.teacher_engine import TeacherEngine
from nemo_like.policy.options import TeacherConfig
from nemo_like.policy.workers.teacher_worker import TeacherWorker
from tests.functional.policy_fixtures import GROUP_SIZE, VOCAB_SIZE, loss_config
from tests.unit.config.checkpoints import DEMO

TOP_K = 5
TOLERANCE = 1e-4
COLUMNS: tuple[Column, ...] = (TEACHER_LOGPROBS, *teacher_topk_columns(TOP_K))


@reads(*COLUMNS)
def reads_all(tokens: Any, cfg: LossConfig) -> Any:
    """A loss that only says what it reads."""


def loss() -> LossConfig:
    return loss_config("tests.functional.teachers:reads_all")


def put(plane: InMemoryDataPlane, batch: dict[str, Any], partition: str = "step") -> KVBatchMeta:
    """The batch in groups of four, or with ``chunk_sizes`` of its own."""
    plane.open_partition(partition, [INPUT_IDS, RESPONSE_MASK, *COLUMNS])
    columns = {column.name: batch["columns"][column.name] for column in (INPUT_IDS, RESPONSE_MASK)}
    lengths, tags = batch["lengths"], batch["tags"]
    chunk_sizes = batch.get("chunk_sizes") or [GROUP_SIZE] * (len(lengths) // GROUP_SIZE)
    return plane.put(partition, columns, lengths=lengths, chunk_sizes=chunk_sizes, tags=tags)


class NotingDataPlane(InMemoryDataPlane):
    """Notes whose columns were written, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[str] = []

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        self.written += meta.sample_ids
        return super().write(meta, columns)


class RankHandle:
    """A handle of the group that every rank of a world has for itself, in which its own worker alone
    computes."""

    name = "teacher"

    def __init__(self, worker: TeacherWorker, rank: int) -> None:
        self._worker, self._rank = worker, rank

    def submit(self, method: str, *args: Any) -> Any:
        if method == "declarations":
            return self._worker.declarations()
        if self._rank != self._worker.coordinates.rank:
            return WorkerScores({}, {}, 0.0)
        return getattr(self._worker, method)(*pickle.loads(pickle.dumps(args)))


class ReadyAnswers:
    """A cluster whose calls are their answers."""

    def gather(self, calls: Sequence[Any], **_: Any) -> list[Any]:
        return list(calls)


def written(plane: InMemoryDataPlane, meta: KVBatchMeta) -> dict[str, np.ndarray]:
    return {
        name: np.array(values) for name, values in plane.fetch(meta, [one.name for one in COLUMNS]).items()
    }


def by_workers(
    coordinates: Coordinates,
    cfg: TeacherConfig,
    batch: dict[str, Any],
    temperature: float,
    vocab_size: int = VOCAB_SIZE,
    num_steps: int = 1,
) -> tuple[list[int], dict[str, np.ndarray]]:
    """On a rank of a world: the numbers of the samples that it wrote in the last step, and their columns."""
    plane = NotingDataPlane()
    worker = TeacherWorker(
        cfg=cfg,
        loss=loss(),
        connections=WorkerConnections(coordinates, plane, ("127.0.0.1", 0), timeout_s=60.0),
        temperature=temperature,
        vocab_size=vocab_size,
    )
    worker.setup()
    assert not any(weight.requires_grad for weight in worker._backend._model.parameters())
    handles = [RankHandle(worker, rank) for rank in range(coordinates.layout.world_size)]
    group = TeacherWorkerGroup(handles, ReadyAnswers(), cfg, deadline_s=lambda stage: 60.0)
    for step in range(num_steps):
        plane.written = []
        whole = put(plane, batch, f"step {step}")
        group.compute_teacher_logprobs(whole)
    numbers = [whole.sample_ids.index(one) for one in plane.written]
    return numbers, written(plane, whole.subset(numbers)) if numbers else {}


class EngineTeacher:
    """An engine that scores a batch of its own process; for an actor."""

    def __init__(self, checkpoint: str) -> None:
        cfg = load_config(
            DEMO,
            [
                *("teacher=default", f"teacher.model_name={checkpoint}", "teacher.data_parallel_size=1"),
                *("teacher.scored_by=engine", "teacher.max_total_sequence_length=64"),
                "generation.vllm_cfg.max_num_seqs=4",
            ],
        )
        assert cfg.teacher is not None
        self._plane = InMemoryDataPlane()
        self._teacher = TeacherEngine(
            cfg=cfg.teacher,
            loss=loss(),
            generation=cfg.generation,
            data_plane=self._plane,
            timeout_s=200.0,
        )

    def scored(self, batch: dict[str, Any]) -> dict[str, np.ndarray]:
        self._teacher.setup()
        meta = put(self._plane, batch)
        self._teacher.compute_teacher_logprobs(meta, model="")
        return written(self._plane, meta)


@torch.no_grad()
def by_dense_model(
    checkpoint: Path, batch: dict[str, Any], temperature: float, vocab_size: int | None = None
) -> list[dict[str, Tensor]]:
    """Per sample its columns, in float64; log-probs over the first ``vocab_size`` tokens alone."""
    loaded = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, experts_implementation="eager"
    )
    model = loaded.eval()
    samples = []
    ids = torch.from_numpy(batch["columns"][INPUT_IDS.name]).long().split(batch["lengths"])
    masks = torch.from_numpy(batch["columns"][RESPONSE_MASK.name]).bool().split(batch["lengths"])
    for tokens, mask in zip(ids, masks, strict=True):
        logits = model(tokens[None]).logits[0, :-1, :vocab_size]
        logprobs = torch.log_softmax(logits / temperature, -1)
        likely = logprobs.topk(TOP_K)
        own = logprobs.gather(1, tokens[1:, None])[:, 0]
        values = {
            "teacher_logprobs": own,
            "teacher_topk_ids": likely.indices,
            "teacher_topk_logprobs": likely.values,
        }
        samples.append({name: _after_first(one, mask) for name, one in values.items()})
    return samples


def _after_first(values: Tensor, mask: Tensor) -> Tensor:
    whole = torch.cat((torch.zeros_like(values[:1]), values))
    return whole * mask.view(-1, *(1 for _ in whole.shape[1:]))


def check(numbers: Sequence[int], columns: dict[str, np.ndarray], expected: list[dict[str, Tensor]]) -> None:
    """``numbers`` are those of the samples that the packed columns are of."""
    assert columns["teacher_topk_ids"].dtype == np.int32
    for name, values in columns.items():
        wanted = torch.cat([expected[number][name] for number in numbers]).numpy()
        np.testing.assert_allclose(values, wanted, atol=TOLERANCE, rtol=0, err_msg=name)
