"""A critic's training, and the advantages and returns that it wrote, as the tripwires see them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.critic import TokenValues
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.configuration import load_config
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.value_objective import ValueObjective
from nemo_like.policy.loss.value_watch import ValueWatch, estimated
from nemo_like.policy.options import ValueConfig
from nemo_like.tripwires.measured import Measured
from tests.unit.algorithms.loss_cases import CONFIG

CPU = torch.device("cpu")
LOADED = load_config(Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml").value
assert LOADED is not None
CRITIC: ValueConfig = replace(LOADED, clip_range=0.2, gae_lambda=0.5)
MASK = np.array([0, 1, 1, 0, 1], np.uint8)
GAPS = np.array([0, 0, 0, 2, 0], np.int32)
ENDS = torch.tensor([9.0, 9.0])  # the values behind the samples
UPDATE = GlobalBatch(num_samples=2, num_tokens=3, micro_batches=(MicroBatch((0, 1), 3),))


def batch(**columns: list[float]) -> PolicyBatch:
    """Two samples, of two and of one response tokens; lambda 0.5.

    Values 0.25, 0.5 and 1, rewards 1 and 2: A = 0.25 + 0.5 x 0.5, 0.5 and 1.
    """
    made = {
        "values": [0.0, 0.25, 0.5, 0.0, 1.0],
        "returns": [0.0, 0.75, 1.0, 0.0, 2.0],
        "token_advantages": [0.0, 0.5, 0.5, 0.0, 1.0],
        **columns,
    }
    return PolicyBatch(
        {
            "input_ids": np.arange(5, dtype=np.int32),
            "response_mask": MASK,
            **{name: np.array(values, np.float32) for name, values in made.items()},
        },
        [3, 2],
        {"shaped_reward": [1.0, 2.0], "is_truncated": [0.0, 0.0], "sample_mask": [1.0, 1.0]},
        CPU,
    )


def test_right_columns_fulfil_gaes_equation() -> None:
    assert estimated(batch(), ENDS, CRITIC, CONFIG) == {
        Measured.advantage_error: 0.0,
        Measured.return_error: 0.0,
    }


@pytest.mark.parametrize(
    ("columns", "cfg", "wrong"),
    [
        ({"returns": [0.0, 0.5, 0.5, 0.0, 1.0]}, CRITIC, Measured.return_error),
        ({"token_advantages": [0.0, 0.75, 0.5, 0.0, 1.0]}, CRITIC, Measured.advantage_error),
        ({}, replace(CRITIC, gae_lambda=1.0), Measured.return_error),
        ({}, replace(CRITIC, gae_lambda_policy=1.0), Measured.advantage_error),
        ({}, replace(CRITIC, gae_length_adaptive_alpha=10.0), Measured.advantage_error),
    ],
)
def test_wrong_columns_do_not(columns: dict[str, list[float]], cfg: ValueConfig, wrong: Measured) -> None:
    assert estimated(batch(**columns), ENDS, cfg, CONFIG)[wrong] > 0.01


def test_a_sample_that_was_cut_off_ends_with_its_value() -> None:
    cut = batch()
    cut.sample_values = {**cut.sample_values, "is_truncated": torch.tensor([0.0, 1.0])}
    assert estimated(cut, ENDS, CRITIC, CONFIG)[Measured.advantage_error] == 0.0
    bootstraps = replace(CRITIC, bootstrap_truncated=True)
    assert estimated(cut, ENDS, bootstraps, CONFIG)[Measured.advantage_error] > 0.01


def test_each_run_of_a_session_ends_by_itself() -> None:
    """The second sample is another run of the first; its reward is that of the session."""
    session = PolicyBatch(
        {**{name: column.numpy() for name, column in batch().columns.items()}, "parent_gaps": GAPS},
        [5],
        {"shaped_reward": [1.0], "is_truncated": [1.0], "sample_mask": [1.0]},
        CPU,
    )
    cfg = replace(CRITIC, bootstrap_truncated=True)
    # Values behind the runs of 0, and of 1 where the second run's advantage is 1 + 1 - 1.
    assert estimated(session, torch.tensor([0.0, 1.0]), cfg, CONFIG)[Measured.advantage_error] == 0.0
    assert estimated(session, torch.tensor([0.0, 2.0]), cfg, CONFIG)[Measured.advantage_error] > 0.01


def trained(values: list[float], change: Any = None) -> dict[Measured, float]:
    """Train on the batch's three tokens, whose values are these, with a changed loss if it is given."""
    metrics = TrainMetrics(CPU, num_replicas=1, own_means=ValueObjective(CRITIC).own_means)
    watch, samples = ValueWatch(CRITIC), batch()
    loss = ValueObjective(CRITIC).loss_of_update(samples, UPDATE, metrics)
    watched = watch.watched(change(loss) if change else loss, samples, UPDATE, 0)
    inputs = samples.micro_batch(UPDATE.micro_batches[0], Schedule((UPDATE,)))
    outputs = torch.tensor(values, requires_grad=True)
    (watched(TokenValues(outputs), inputs) * 1.0).backward()
    return watch.measured()


def test_the_first_update_has_the_values_of_the_column() -> None:
    found = trained([0.25, 0.5, 1.0])
    assert found[Measured.num_trained_tokens] == 3
    assert found[Measured.first_value_gap] == 0.0
    assert found[Measured.loss_gradient_error] < 1e-6
    assert found[Measured.loss_error] < 1e-6
    assert trained([0.5, 0.25, 1.0])[Measured.first_value_gap] == pytest.approx(0.25)


def test_clipped_values_have_no_gradient_and_a_loss_that_says_so_is_right() -> None:
    found = trained([0.6, 0.0, 1.0])  # 0.35 up, of which 0.2 count, and 0.5 down
    assert found[Measured.loss_gradient_error] < 1e-6


def test_another_loss_is_seen() -> None:
    found = trained([0.3, 0.5, 1.1], lambda loss: lambda *given: 1.5 * loss(*given))
    assert found[Measured.loss_gradient_error] > 0.01
    assert found[Measured.loss_error] > 0.01


def test_a_rank_without_values_measures_nothing() -> None:
    assert ValueWatch(CRITIC).measured() == {}
