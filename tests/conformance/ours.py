"""Runs a case by nemo_like's own code, from columns and tags to loss, gradient and update.

The table of logits stands in for a model; everything after the log-probs is what every backend runs: the
objective, the shares of the global mean, and the function that ``loss_fn.kind`` names.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nemo_like.algorithms.estimators import AdvantageInputs, build_estimator
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.columns import ENTROPIES, MESSAGE_FLAGS, Column
from nemo_like.batch.meta import GlobalBatch, MicroBatch, MicroBatchLayout, Schedule
from nemo_like.batch.tags import ENTROPY_COEF, LIKELIHOOD_WEIGHT
from nemo_like.batch.tags import KL_SCALE as KL_SCALE_TAG
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.entropy_threshold import entropy_threshold
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.loss.train_metrics import TrainMetrics
from tests.conformance.loss_configs import loss_config
from tests.conformance.reference import (
    KL_SCALE,
    first_update,
    flags_of,
    likelihood_weights,
    reward_components,
)

CPU = torch.device("cpu")
PROMPT = 2  # tokens of a prompt in the golden batches
_COLUMNS = ("prev", "generation", "reference")


def packed_columns(samples: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Return the samples' columns end to end, as the data plane gives them."""
    columns = {"input_ids": np.concatenate([sample["ids"] for sample in samples]).astype(np.int32)}
    columns["response_mask"] = np.concatenate([sample["generated"] for sample in samples]).astype(np.uint8)
    for name in _COLUMNS:
        values = np.zeros(len(columns["input_ids"]), np.float32)
        values[columns["response_mask"] > 0] = np.concatenate([sample[name] for sample in samples])
        columns[f"{name}_logprobs"] = values
    return columns


class RowLayout(Enum):
    """How samples lie in rows."""

    padded = "padded"
    packed = "packed"
    shared = "packed, with what neighbours begin with once"

    @property
    def of_schedule(self) -> MicroBatchLayout:
        return MicroBatchLayout.padded if self is RowLayout.padded else MicroBatchLayout.packed


def run(one: dict[str, Any], case: dict[str, Any], split: str, layout: RowLayout) -> dict[str, Any]:
    """Return what ``reference.evaluate`` returns, by one split and layout of micro-batches."""
    cfg, samples = loss_config(case), one["samples"]
    table = torch.tensor(one["table"], dtype=torch.float32, requires_grad=True)
    total, by_token = 0.0, {}
    for rank in one["splits"][split]:
        mine = [row for micro_batch in rank for row in micro_batch]
        batch = _policy_batch(samples, mine, case)
        update = _update(samples, rank, mine, layout)
        objective = PolicyObjective(cfg, 1.0).loss_of_update(batch, update, TrainMetrics(CPU, num_replicas=1))
        for spec in update.micro_batches:
            inputs = batch.micro_batch(spec, Schedule((update,), layout.of_schedule))
            scores = _scores(table, batch, inputs.packed_index, with_entropy=bool(case["entropy"]))
            loss = objective(scores, inputs)
            (gradient,) = torch.autograd.grad(loss, scores.logprobs, retain_graph=True)
            loss.backward()
            total += loss.item()
            rows = inputs.rows[inputs.sample_index].tolist()
            for row, place, value in zip(rows, inputs.packed_index.tolist(), gradient.tolist(), strict=True):
                by_token[mine[row], place] = value
    assert table.grad is not None
    return {
        "loss": total,
        "gradient": [by_token[key] for key in sorted(by_token)],
        "update": first_update(table.grad).flatten().tolist(),
    }


def _scores(table: Tensor, batch: PolicyBatch, places: Tensor, *, with_entropy: bool) -> TokenScores:
    ids = batch.columns["input_ids"].long()
    rows = table[ids[places - 1]].log_softmax(-1)
    entropy = -(rows.exp() * rows).sum(-1)
    return TokenScores(
        logprobs=rows.gather(1, ids[places, None])[:, 0], entropy=entropy if with_entropy else None
    )


def further_columns(samples: Sequence[dict[str, Any]], rows: Sequence[int]) -> dict[Column, np.ndarray]:
    """Return the columns that cases with such a key read besides, for the samples at ``rows``."""
    generated = np.concatenate([samples[row]["generated"] for row in rows])
    entropies = np.zeros(len(generated), np.float32)
    entropies[generated > 0] = -np.concatenate([samples[row]["generation"] for row in rows])
    flags = np.concatenate([np.full(len(samples[row]["ids"]), flags_of(row), np.uint8) for row in rows])
    return {ENTROPIES: entropies, MESSAGE_FLAGS: flags}


def further_tags(samples: Sequence[dict[str, Any]], case: dict[str, Any]) -> dict[str, list[float]]:
    """Return the tags that cases with such a key read besides, of all samples."""
    return {
        KL_SCALE_TAG.name: [KL_SCALE] * len(samples),
        ENTROPY_COEF.name: [case["entropy"]] * len(samples),
        LIKELIHOOD_WEIGHT.name: likelihood_weights(samples, {"likelihood": 0.0, **case}),
    }


def _policy_batch(
    samples: Sequence[dict[str, Any]], rows: Sequence[int], case: dict[str, Any]
) -> PolicyBatch:
    tags = {
        "advantage": [sample["advantage"] for sample in samples],
        "sample_mask": [float(sample["trains"]) for sample in samples],
        **further_tags(samples, case),
    }
    mine = [samples[row] for row in rows]
    lengths = [len(sample["ids"]) for sample in mine]
    own = {name: [values[row] for row in rows] for name, values in tags.items()}
    batch = PolicyBatch(packed_columns(mine), lengths, own, CPU)
    batch.add(further_columns(samples, rows))
    if "top_entropy" in case:
        trained = [row for row, sample in enumerate(samples) if sample["trains"]]
        entropies = further_columns(samples, trained)[ENTROPIES]
        entropies = entropies[np.concatenate([samples[row]["generated"] for row in trained]) > 0]
        batch.set_entropy_threshold(entropy_threshold(torch.tensor(entropies), case["top_entropy"], None))
    return batch


def _update(
    samples: Sequence[dict[str, Any]], rank: list[list[int]], mine: list[int], layout: RowLayout
) -> GlobalBatch:
    """Return one update with these micro-batches; its counts are over all ranks."""
    micro_batches = []
    for rows in rank:
        ids = [samples[row]["ids"] for row in rows]
        shared: tuple[int, ...] = ()
        if layout is RowLayout.shared:
            pairs = pairwise([one[:PROMPT] for one in ids])
            shared = (0, *(PROMPT if one == before else 0 for before, one in pairs))
        padded = (max if layout is RowLayout.padded else sum)(map(len, ids))
        micro_batches.append(MicroBatch(tuple(mine.index(row) for row in rows), padded, shared))
    trained = [sample for sample in samples if sample["trains"]]
    num_tokens = sum(sum(sample["generated"]) for sample in trained)
    return GlobalBatch(num_samples=len(trained), num_tokens=num_tokens, micro_batches=tuple(micro_batches))


def advantages(one: dict[str, Any], cfg: GRPOConfig) -> Sequence[float]:
    """Return the advantages of a batch's samples by the configured estimator."""
    samples = one["samples"]
    return build_estimator(cfg)(
        AdvantageInputs(
            rewards=[sample["reward"] for sample in samples],
            group_ids=[sample["group"] for sample in samples],
            sample_mask=[float(sample["trains"]) for sample in samples],
            num_response_tokens=[float(sum(sample["generated"])) for sample in samples],
            components=reward_components(samples),
        )
    ).per_sample
