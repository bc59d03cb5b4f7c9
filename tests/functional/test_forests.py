"""Samples that are forests train as a dense model does that reads every path by itself.

A token would have another log-prob if it attended to more than its path, or counted other positions. The
claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.batch.columns import PARENT_GAPS
from nemo_like.batch.forest import ROOT
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import policy_config, random_batch
from tests.functional.test_policy_parity import (
    GSPO,
    KL,
    NUM_SAMPLES,
    PACKED,
    SEQUENCE_PARALLEL,
    SHARED,
    Case,
    Matrix,
    Outcome,
    as_params,
    test_each_column_and_sample_is_written_once_and_by_leaders_only,
    test_entropies_equal_the_dense_model,
    test_exported_weights_equal_the_dense_model_after_its_updates,
    test_logprobs_equal_the_dense_model,
    test_the_canary_is_scored_by_the_trained_weights_at_temperature_1,
    test_training_metrics_equal_the_dense_model,
    test_tripwires_measure_a_healthy_step_in_every_layout,
)
from tests.unit.batch.forests import path_of

__all__ = [
    "test_each_column_and_sample_is_written_once_and_by_leaders_only",
    "test_entropies_equal_the_dense_model",
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_logprobs_equal_the_dense_model",
    "test_the_canary_is_scored_by_the_trained_weights_at_temperature_1",
    "test_training_metrics_equal_the_dense_model",
    "test_tripwires_measure_a_healthy_step_in_every_layout",
]
# Several means over the tokens of a sample: a session is one sample, however many runs it has.
SEQUENCE_MEAN = {"token_level_loss": False}
NUM_PROMPT_TOKENS = 3


def branched_batch() -> dict[str, Any]:
    """A random batch whose samples are random forests; after their prompts, every third token or so follows
    another token than the one before it, or none. Such tokens may be generated, and runs may have one
    token."""
    batch, rng = random_batch(NUM_SAMPLES), np.random.default_rng(11)
    columns = batch["columns"]
    parents = [random_parents(length, rng) for length in batch["lengths"]]
    roots = np.concatenate([[parent == ROOT for parent in of_sample] for of_sample in parents])
    columns["response_mask"][roots] = 0
    columns["generation_logprobs"][roots] = 0
    columns[PARENT_GAPS.name] = np.concatenate(
        [np.arange(len(of_sample)) - 1 - np.array(of_sample) for of_sample in parents]
    ).astype(np.int32)
    owners = np.repeat(np.arange(NUM_SAMPLES), batch["lengths"])
    batch["tags"]["num_response_tokens"] = np.bincount(owners, columns["response_mask"]).astype(int).tolist()
    batch["more_columns"], batch["further_inputs"] = [PARENT_GAPS], (PARENT_GAPS,)
    return batch


def random_parents(length: int, rng: np.random.Generator) -> list[int]:
    parents = [*range(ROOT, NUM_PROMPT_TOKENS - 1)]
    for token in range(NUM_PROMPT_TOKENS, length):
        parents.append(int(rng.integers(ROOT, token - 1)) if rng.random() < 0.3 else token - 1)
    return parents


def per_sample(batch: dict[str, Any], name: str) -> list[Any]:
    return np.split(batch["columns"][name], np.cumsum(batch["lengths"])[:-1])


def parents_of(batch: dict[str, Any], row: int) -> list[int]:
    gaps = per_sample(batch, PARENT_GAPS.name)[row]
    parents: list[int] = (np.arange(len(gaps)) - 1 - gaps).tolist()
    return parents


class ForestReference(DenseReference):
    """Reads the path of every token that another follows, each as if there were no other token."""

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        parents = parents_of(batch, row)
        of_paths = {
            parent: self.model(ids[:, path_of(parent, parents)]).logits[0, -1]
            for parent in set(parents) - {ROOT}
        }
        of_paths[ROOT] = torch.zeros_like(of_paths[0])  # predicts nothing that is scored
        return torch.stack([*(of_paths[parent] for parent in parents[1:]), of_paths[ROOT]])[None]

    def choices(self, batch: dict[str, Any], rows: Iterable[int]) -> Tensor:
        """Each response token is the only one of a sample that is its path."""
        ids, masks = (per_sample(batch, name) for name in ("input_ids", "response_mask"))
        paths = [
            ids[row][path_of(token, parents_of(batch, row))]
            for row in rows
            for token in masks[row].nonzero()[0].tolist()
        ]
        columns = {
            "input_ids": np.concatenate(paths),
            "response_mask": np.concatenate([np.arange(len(path)) == len(path) - 1 for path in paths]),
        }
        alone = {"columns": columns, "lengths": [len(path) for path in paths]}
        return super().choices(alone, range(len(paths)))


@dataclass(frozen=True)
class ForestCase(Case):
    backend: str = "megatron"

    def config(self, model: Path) -> PolicyConfig:
        return policy_config(model, backend=self.backend, **self.layout, **self.options)


class ForestMatrix(Matrix):
    reference = ForestReference
    make_batch = staticmethod(branched_batch)


FSDP = {"backend": "fsdp"}
MIXTURE, WINDOWED = {"model_type": "qwen3_moe"}, {"model_type": "mistral"}
CASES = [
    ForestCase("one process", {}, PACKED, {}, KL),
    ForestCase("one process, prompts shared", {}, SHARED, {}, KL),
    ForestCase("one process, means over sessions", {}, PACKED, {}, SEQUENCE_MEAN, slow=True),
    ForestCase("recomputed", {}, {"activation_checkpointing": True, **SHARED}, {}, KL, slow=True),
    ForestCase("TP2 with sequence parallelism", SEQUENCE_PARALLEL, SHARED, {}, GSPO),
    ForestCase("PP2 x DP2", {"pp": 2, "dp": 2}, PACKED, {}, KL, slow=True),
    ForestCase("PP2, prompts shared", {"pp": 2}, SHARED, {}, KL),
    ForestCase("CP2", {"cp": 2}, PACKED, {}, KL),
    ForestCase("CP2, prompts shared", {"cp": 2}, SHARED, {}, KL, slow=True),
    ForestCase("CP2 x TP2", {"cp": 2, **SEQUENCE_PARALLEL}, SHARED, {}, KL, slow=True),
    ForestCase("CP2 x PP2", {"cp": 2, "pp": 2}, SHARED, {}, KL, slow=True),
    ForestCase("EP2", {"dp": 2, "ep": 2}, SHARED, MIXTURE, KL, slow=True),
    ForestCase("a window", {}, SHARED, WINDOWED, KL),
    ForestCase("a window, CP2", {"cp": 2}, SHARED, WINDOWED, KL, slow=True),
    ForestCase("FSDP, DP2", {"dp": 2}, SHARED, {}, KL, **FSDP),
    ForestCase("FSDP, TP2", {"tp": 2}, PACKED, {}, KL, slow=True, **FSDP),
    ForestCase("FSDP, CP2", {"cp": 2}, SHARED, {}, KL, **FSDP),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForestMatrix]:
    with ForestMatrix(CASES, tmp_path_factory.mktemp("forests")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: ForestMatrix) -> Outcome:
    return matrix.outcome(request.param)
