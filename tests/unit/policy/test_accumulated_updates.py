"""A loss that is computed in parts, by counts of 1, and normalised at the end is that of the whole update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.algorithms.token_values import TokenValues
from nemo_like.batch.columns import INPUT_IDS, RESPONSE_MASK
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.configuration import load_config
from nemo_like.policy.accumulation import check_accumulated, normalise_accumulated
from nemo_like.policy.batch import PolicyBatch
from nemo_like.policy.objective import Objective, PolicyObjective
from nemo_like.policy.train_metrics import TrainMetrics
from nemo_like.policy.update_watch import UpdateWatch
from nemo_like.policy.value_objective import ValueObjective
from nemo_like.tripwires.measured import Measured
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind

CPU = torch.device("cpu")
CRITIC = load_config(Path(__file__).resolve().parents[3] / "configs/ppo_arithmetic_cpu.yaml").value
assert CRITIC is not None
LENGTHS = (3, 2, 5, 4, 2, 6)  # of which one is the prompt
MASK = (1.0, 0.0, 1.0, 1.0, 1.0, 1.0)
WHOLE = GlobalBatch(
    num_samples=5,
    num_tokens=2 + 4 + 3 + 1 + 5,
    micro_batches=(MicroBatch((0, 1, 2), 5), MicroBatch((3, 4, 5), 6)),
)
FULL = replace(
    CONFIG, reference_policy_kl_penalty=0.1, use_importance_sampling_correction=True, entropy_coef=0.01
)
LOSSES = {
    "mean over tokens": FULL,
    "mean over samples": replace(FULL, token_level_loss=False, reference_policy_kl_type=KLType.k2),
    "constant normaliser": replace(CONFIG, token_level_loss=False, sequence_length_normalizer=9),
    "GSPO": GSPO,
    "on policy": replace(CONFIG, force_on_policy_ratio=True),
    "SAPO": of_kind("sapo"),
}


def columns() -> dict[str, Any]:
    rng = np.random.default_rng(2)
    total = sum(LENGTHS)
    names = ("prev_logprobs", "generation_logprobs", "reference_logprobs", "values", "returns")
    found = {name: (-1 - 0.2 * rng.random(total)).astype(np.float32) for name in names}
    mask = np.concatenate([np.r_[0, np.ones(length - 1)] for length in LENGTHS]).astype(np.uint8)
    return {**found, INPUT_IDS.name: np.arange(total, dtype=np.int32), RESPONSE_MASK.name: mask}


def batch_of(samples: Sequence[int]) -> PolicyBatch:
    """These of the six samples, in this order."""
    parts = {name: np.split(values, np.cumsum(LENGTHS)[:-1]) for name, values in columns().items()}
    return PolicyBatch(
        {name: np.concatenate([of_sample[one] for one in samples]) for name, of_sample in parts.items()},
        [LENGTHS[one] for one in samples],
        {
            "advantage": [0.5 * one - 1 for one in samples],
            "sample_mask": [MASK[one] for one in samples],
        },
        CPU,
    )


class Updating:
    """Computes losses of one update, and keeps what they are differentiated by, by the token's id."""

    def __init__(self, objective: Objective, loss: LossConfig) -> None:
        self.objective, self.metrics = objective, TrainMetrics(CPU, 1, objective.own_means)
        self.watch = UpdateWatch(loss)
        self.gradients = torch.zeros(sum(LENGTHS))

    def compute(self, batch: PolicyBatch, update: GlobalBatch) -> None:
        loss = self.objective.of_update(batch, update, self.metrics, self.watch)
        for spec in update.micro_batches:
            inputs = batch.micro_batch(spec, Schedule((update,)))
            outputs = (-1 - 0.01 * (inputs.token_ids % 7)).requires_grad_()
            entropy = (0.5 + 0.01 * inputs.token_ids).requires_grad_()
            if isinstance(self.objective, ValueObjective):
                loss(TokenValues(outputs), inputs).backward()
            else:
                loss(TokenScores(logprobs=outputs, entropy=entropy), inputs).backward()
            assert outputs.grad is not None
            self.gradients[inputs.token_ids] += outputs.grad

    def result(self) -> dict[str, float]:
        self.metrics.add_update(grad_norm=1.0, learning_rate=0.1)
        return {name: metric.value for name, metric in self.metrics.result().items()}


def at_once(objective: Objective, loss: LossConfig) -> Updating:
    updating = Updating(objective, loss)
    updating.compute(batch_of(range(6)), WHOLE)
    return updating


def in_parts(objective: Objective, loss: LossConfig, parts: Sequence[Sequence[int]]) -> Updating:
    updating = Updating(objective, loss)
    for part in parts:
        specs = tuple(MicroBatch((row,), max(LENGTHS)) for row in range(len(part)))
        counted = GlobalBatch(num_samples=99, num_tokens=99, micro_batches=specs)
        updating.compute(batch_of(part), counted.unnormalised())
    share = normalise_accumulated(
        objective, replace(WHOLE, micro_batches=()), updating.metrics, updating.watch
    )
    updating.gradients *= share
    return updating


@st.composite
def cuts(draw: st.DrawFn) -> list[list[int]]:
    """The six samples in any order, cut anywhere."""
    order = draw(st.permutations(range(6)))
    ends = [*sorted(draw(st.sets(st.integers(1, 5)))), 6]
    return [list(order[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=30)
@given(parts=cuts())
def test_any_cut_gives_gradient_metrics_and_losses_of_the_whole(name: str, parts: list[list[int]]) -> None:
    cfg = LOSSES[name]
    objective = PolicyObjective(cfg, 1.0)
    expected, found = at_once(objective, cfg), in_parts(objective, cfg, parts)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-6, atol=1e-7)
    assert found.result() == pytest.approx(expected.result(), rel=2e-6)
    measured = found.watch.measured()
    assert measured[Measured.num_trained_tokens] == WHOLE.num_tokens
    assert measured[Measured.loss_error] < 1e-5
    assert measured[Measured.loss_gradient_error] < 1e-5


@settings(max_examples=30)
@given(parts=cuts())
def test_a_critics_loss_is_cut_in_the_same_way(parts: list[list[int]]) -> None:
    objective = ValueObjective(CRITIC)
    expected, found = at_once(objective, CONFIG), in_parts(objective, CONFIG, parts)
    torch.testing.assert_close(found.gradients, expected.gradients, rtol=2e-6, atol=1e-7)
    assert found.result() == pytest.approx(expected.result(), rel=2e-6)


def test_a_share_that_is_not_the_counts_own_is_noticed() -> None:
    objective = PolicyObjective(CONFIG, 1.0)
    updating = Updating(objective, CONFIG)
    updating.compute(batch_of(range(6)), WHOLE.unnormalised())
    updating.watch.normalise(WHOLE, 1.01 / WHOLE.num_tokens)
    assert updating.watch.measured()[Measured.loss_gradient_error] > 5e-3
    assert updating.watch.measured()[Measured.loss_error] > 1e-3


ONE, NONE = replace(WHOLE, micro_batches=(MicroBatch((0,), 3),)), replace(WHOLE, micro_batches=())


def test_only_the_first_update_has_no_micro_batches_and_only_after_accumulation() -> None:
    check_accumulated(Schedule((ONE, ONE)), is_held=False)
    check_accumulated(Schedule((NONE, ONE)), is_held=True)
    with pytest.raises(RuntimeError, match="for the first update, and the schedule computes it again"):
        check_accumulated(Schedule((ONE, ONE)), is_held=True)
    with pytest.raises(RuntimeError, match="computes nothing in its first update, and no gradients"):
        check_accumulated(Schedule((NONE,)), is_held=False)
    with pytest.raises(RuntimeError, match="only the first update"):
        check_accumulated(Schedule((NONE, NONE)), is_held=True)
