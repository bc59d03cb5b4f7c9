"""From values to a critic's loss and metrics: what tokens they meet, and what a masked sample may hold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.critic import TokenValues
from nemo_like.batch.meta import GlobalBatch, MicroBatch, MicroBatchLayout, Schedule
from nemo_like.configuration import load_config
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.value_objective import ValueObjective
from nemo_like.policy.options import ValueConfig

CPU = torch.device("cpu")
CONFIG = load_config(Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml").value
assert CONFIG is not None
MASK = [0, 1, 1, 0, 1, 0, 1, 0, 1]


def batch(values: list[float], returns: list[float]) -> PolicyBatch:
    """Three samples of 2, 1 and 2 response tokens, the last with a token of its environment between them; the
    second does not train."""
    columns: dict[str, Any] = {
        "input_ids": np.arange(9, dtype=np.int32),
        "response_mask": np.array(MASK, np.uint8),
        "values": np.array(values, np.float32),
        "returns": np.array(returns, np.float32),
    }
    return PolicyBatch(columns, [3, 2, 4], {"sample_mask": [1.0, 0.0, 1.0]}, CPU)


def train(
    cfg: ValueConfig,
    made: PolicyBatch,
    by_token: list[float],
    cuts: list[list[int]],
    layout: MicroBatchLayout = MicroBatchLayout.padded,
) -> tuple[float, list[float], dict[str, float]]:
    """Loss, gradient by token and metrics of one update whose micro-batches have the rows ``cuts``; the model
    gives token t of the packed columns the value ``by_token[t]``."""
    padded_length = 3 if layout is MicroBatchLayout.padded else 9
    micro_batches = tuple(MicroBatch(tuple(rows), padded_length) for rows in cuts)
    update = GlobalBatch(num_samples=2, num_tokens=4, micro_batches=micro_batches)
    schedule, metrics = Schedule((update,), layout), TrainMetrics(CPU, 1, ValueObjective(cfg).own_means)
    loss = ValueObjective(cfg).loss_of_update(made, update, metrics)
    given = torch.tensor(by_token, requires_grad=True)
    total = torch.zeros(())
    for spec in micro_batches:
        inputs = made.micro_batch(spec, schedule)
        total = total + loss(TokenValues(given[inputs.packed_index]), inputs)
    total.backward()
    metrics.add_update(grad_norm=1.0, learning_rate=0.1)
    found = {name: metric.value for name, metric in metrics.result().items()}
    return total.item(), given.grad.tolist(), found


OLD = [9.0, 1.0, 2.0, 9.0, np.nan, 9.0, -1.0, 9.0, 0.5]
RETURNS = [9.0, 2.0, 2.0, 9.0, np.nan, 9.0, 1.0, 9.0, 0.0]
# 0.5 too far towards its return; as before; masked; 0.1 towards it; 0.5 past it.
NOW = [9.0, 1.7, 2.0, 9.0, 5.0, 9.0, -0.9, 9.0, 0.5]


def test_the_loss_is_the_mean_over_all_tokens_that_train() -> None:
    cfg = replace(CONFIG, clip_range=0.2)
    loss, gradient, metrics = train(cfg, batch(OLD, RETURNS), NOW, [[0, 1, 2]])
    assert loss == pytest.approx((0.8**2 + 0 + 1.9**2 + 0.5**2) / 2 / 4)
    assert gradient == pytest.approx([0, 0, 0, 0, 0, 0, -1.9 / 4, 0, 0.5 / 4])
    assert metrics == pytest.approx(
        {
            "loss": loss,
            "grad_norm": 1.0,
            "lr": 0.1,
            "mean": (1.7 + 2.0 - 0.9 + 0.5) / 4,
            "clip_fraction": 1 / 4,
            "error": (0.3 + 0 + 1.9 + 0.5) / 4,
        }
    )


def test_without_a_range_every_error_counts() -> None:
    loss, gradient, metrics = train(replace(CONFIG, clip_range=None), batch(OLD, RETURNS), NOW, [[0, 1, 2]])
    assert loss == pytest.approx((0.3**2 + 0 + 1.9**2 + 0.5**2) / 2 / 4)
    assert gradient[1] == pytest.approx(-0.3 / 4)
    assert metrics["clip_fraction"] == 0


NUMBERS = st.lists(st.floats(-3, 3, width=32), min_size=9, max_size=9)


@settings(max_examples=50)
@given(
    NUMBERS,
    NUMBERS,
    NUMBERS,
    st.sampled_from([[[0], [1], [2]], [[2, 0], [1]], [[1, 2], [0]], [[2, 1, 0]]]),
    st.sampled_from([MicroBatchLayout.padded, MicroBatchLayout.packed]),
)
def test_it_is_the_same_however_a_batch_is_cut(
    old: list[float], returns: list[float], now: list[float], cuts: list[list[int]], layout: MicroBatchLayout
) -> None:
    made = batch(old, returns)
    loss, gradient, metrics = train(CONFIG, made, now, [[0, 1, 2]])
    other_loss, other_gradient, other_metrics = train(CONFIG, made, now, cuts, layout)
    assert other_loss == pytest.approx(loss, rel=1e-5, abs=1e-6)
    assert other_gradient == pytest.approx(gradient, rel=1e-5, abs=1e-6)
    assert other_metrics == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_a_critic_has_neither_log_probs_nor_a_reference() -> None:
    objective = ValueObjective(CONFIG)
    assert objective.scoring is None
    assert not objective.keeps_reference
    assert objective.is_scored_before
