"""Samples of several branches train as a dense model does that reads each branch by itself.

A branch's tokens would have other log-probs if they attended to the branch before, or counted its
positions. The claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.batch.columns import BRANCH_STARTS
from nemo_like.policy.options import PolicyConfig
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import policy_config, random_batch
from tests.functional.test_policy_parity import (
    GSPO,
    KL,
    NUM_SAMPLES,
    PACKED,
    SEQUENCE_PARALLEL,
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

__all__ = [
    "test_each_column_and_sample_is_written_once_and_by_leaders_only",
    "test_entropies_equal_the_dense_model",
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_logprobs_equal_the_dense_model",
    "test_the_canary_is_scored_by_the_trained_weights_at_temperature_1",
    "test_training_metrics_equal_the_dense_model",
    "test_tripwires_measure_a_healthy_step_in_every_layout",
]
# By sample, in turn: a session that was never cut, one that was compacted, and one that was compacted and
# had two sub-agents, the second of which answered in one token.
BRANCHES = ((), (4,), (3, 4, 5))
# Several means over the tokens of a sample: a session is one sample, however many branches it has.
SEQUENCE_MEAN = {"token_level_loss": False}


def branched_batch() -> dict[str, Any]:
    """A random batch whose samples have further branches, each with a prompt of one token."""
    batch = random_batch(NUM_SAMPLES)
    starts = np.zeros(sum(batch["lengths"]), np.uint8)
    columns, first = batch["columns"], 0
    for row, length in enumerate(batch["lengths"]):
        for place in BRANCHES[row % len(BRANCHES)]:
            starts[first + place] = 1
        first += length
    prompts = starts > 0
    columns["response_mask"][prompts] = 0
    columns["generation_logprobs"][prompts] = 0
    columns[BRANCH_STARTS.name] = starts
    owners = np.repeat(np.arange(NUM_SAMPLES), batch["lengths"])
    batch["tags"]["num_response_tokens"] = np.bincount(owners, columns["response_mask"]).astype(int).tolist()
    batch["more_columns"], batch["further_inputs"] = [BRANCH_STARTS], (BRANCH_STARTS,)
    return batch


class BranchedReference(DenseReference):
    """Reads one branch after the other, each as if there were no other."""

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        starts = torch.from_numpy(batch["columns"][BRANCH_STARTS.name]).split(batch["lengths"])[row]
        ends = [*starts.nonzero()[:, 0].tolist(), ids.shape[1]]
        branches = ids.split(np.diff([0, *ends]).tolist(), dim=1)
        return torch.cat([self.model(branch).logits for branch in branches], dim=1)


@dataclass(frozen=True)
class BranchCase(Case):
    backend: str = "megatron"

    def config(self, model: Path) -> PolicyConfig:
        return policy_config(model, backend=self.backend, **self.layout, **self.options)


class BranchMatrix(Matrix):
    reference = BranchedReference
    make_batch = staticmethod(branched_batch)


FSDP = {"backend": "fsdp"}
CASES = [
    BranchCase("one process", {}, PACKED, {}, KL),
    BranchCase("one process, means over sessions", {}, PACKED, {}, SEQUENCE_MEAN),
    BranchCase("TP2 with sequence parallelism", SEQUENCE_PARALLEL, PACKED, {}, GSPO),
    BranchCase("PP2 x DP2", {"pp": 2, "dp": 2}, PACKED, {}, KL, slow=True),
    BranchCase("FSDP, DP2", {"dp": 2}, PACKED, {}, KL, **FSDP),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BranchMatrix]:
    with BranchMatrix(CASES, tmp_path_factory.mktemp("branches")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: BranchMatrix) -> Outcome:
    return matrix.outcome(request.param)
