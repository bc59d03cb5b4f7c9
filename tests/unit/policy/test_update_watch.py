"""What the watch sees of losses that training back-propagates."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.losses import LossTerms, LossTokens
from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import MESSAGE_FLAGS, TOKEN_ADVANTAGES
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.update_watch import UpdateWatch
from nemo_like.tripwires.measured import Measured
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind

CPU = torch.device("cpu")
MICRO_BATCHES = (MicroBatch(rows=(0, 1), padded_length=3), MicroBatch(rows=(2,), padded_length=3))
UPDATE = GlobalBatch(num_samples=2, num_tokens=4, micro_batches=MICRO_BATCHES)
FULL = replace(
    CONFIG,
    reference_policy_kl_penalty=0.1,
    reference_policy_kl_type=KLType.k2,
    use_importance_sampling_correction=True,
    entropy_coef=0.01,
)


def batch() -> PolicyBatch:
    """Three samples of 2, 1 and 2 response tokens; the second does not train."""
    torch.manual_seed(0)
    mask = np.array([0, 1, 1, 0, 1, 0, 1, 1], np.uint8)
    columns: dict[str, Any] = {
        name: np.where(mask, -1.0 + 0.1 * torch.randn(8).numpy(), 0.0).astype(np.float32)
        for name in ("prev_logprobs", "generation_logprobs", "reference_logprobs")
    }
    columns |= {"input_ids": np.arange(8, dtype=np.int32), "response_mask": mask}
    tags = {"advantage": [2.0, 1.0, -1.0], "sample_mask": [1.0, 0.0, 1.0], "kl_scale": [0.5] * 3}
    return PolicyBatch(columns, [3, 2, 3], tags, CPU)


def train(
    cfg: LossConfig, *, factor: float = 1.0, num_updates: int = 2, made: PolicyBatch | None = None
) -> dict[Measured, float]:
    """What is measured of updates whose gradients are multiplied by ``factor`` behind the loss's back."""
    made = made or batch()
    watch, metrics = UpdateWatch(cfg), TrainMetrics(CPU, num_replicas=1)
    for _ in range(num_updates):
        loss = PolicyObjective(cfg, 1.0).loss_of_update(made, UPDATE, metrics)
        loss = watch.watched(loss, made, UPDATE, metrics.num_updates)
        for spec in UPDATE.micro_batches:
            inputs = made.micro_batch(spec, Schedule((UPDATE,)))
            count = len(inputs.token_ids)
            logprobs = torch.full((count,), -1.05, requires_grad=True)
            entropy = torch.full((count,), 0.5, requires_grad=True) if cfg.entropy_coef is not None else None
            (factor * loss(TokenScores(logprobs=logprobs, entropy=entropy), inputs)).backward()
        metrics.add_update(grad_norm=1.0, learning_rate=0.1)
    return watch.measured()


@pytest.mark.parametrize(
    "cfg",
    [
        CONFIG,
        FULL,
        replace(CONFIG, force_on_policy_ratio=True),
        replace(CONFIG, use_generation_logprobs_as_prev=True),
        GSPO,
        replace(CONFIG, use_kl_in_reward=True, reference_policy_kl_penalty=0.1),
    ],
)
def test_training_as_configured_differs_by_rounding(cfg: LossConfig) -> None:
    found = train(cfg)
    assert found[Measured.loss_gradient_error] < 1e-5
    assert found[Measured.loss_error] < 1e-5
    assert found[Measured.num_trained_tokens] == 2 * 4


def test_gradients_that_were_scaled_are_noticed() -> None:
    found = train(FULL, factor=0.5)
    assert found[Measured.loss_gradient_error] > 0.4
    assert found[Measured.loss_error] < 1e-5


def test_columns_that_changed_on_the_way_to_the_loss_are_noticed() -> None:
    made = batch()
    watch, metrics = UpdateWatch(CONFIG), TrainMetrics(CPU, num_replicas=1)
    other = of_kind("policy_gradient", ratio_clip_max=0.001)
    loss = PolicyObjective(other, 1.0).loss_of_update(made, UPDATE, metrics)
    loss = watch.watched(loss, made, UPDATE, 0)
    for spec in UPDATE.micro_batches:
        inputs = made.micro_batch(spec, Schedule((UPDATE,)))
        logprobs = torch.full((len(inputs.token_ids),), -0.9, requires_grad=True)
        loss(TokenScores(logprobs=logprobs), inputs).backward()
    assert watch.measured()[Measured.loss_gradient_error] > 0.1


def test_the_first_updates_gap_to_the_scored_logprobs_is_measured() -> None:
    made = batch()
    trains = torch.tensor([1, 2, 6, 7])
    gap = (made.columns["prev_logprobs"][trains] + 1.05).abs().mean().item()
    assert train(CONFIG, made=made)[Measured.first_ratio_gap] == pytest.approx(gap, rel=1e-5)
    assert Measured.first_ratio_gap not in train(replace(CONFIG, force_on_policy_ratio=True))


def test_a_sample_that_does_not_train_may_hold_anything() -> None:
    made = batch()
    made.columns["prev_logprobs"] = made.columns["prev_logprobs"].clone()
    made.columns["prev_logprobs"][4] = torch.nan
    assert train(CONFIG, made=made)[Measured.loss_gradient_error] < 1e-5


def own_loss(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    ones = torch.ones_like(tokens.mask)
    return LossTerms(loss=(tokens.weights * tokens.logprobs).sum(), ratio=ones, clipped_ratio=ones, means={})


def test_ones_own_loss_has_no_formula_to_compare_with() -> None:
    found = train(of_kind(f"{__name__}:own_loss"))
    assert Measured.loss_gradient_error not in found
    assert found[Measured.num_trained_tokens] == 2 * 4


def test_a_rank_that_scored_nothing_measures_nothing() -> None:
    assert UpdateWatch(CONFIG).measured() == {}


def with_a_critic() -> PolicyBatch:
    made = batch()
    own = np.array([9, 1.5, -0.5, 9, np.nan, 9, 0.5, -2.0], np.float32)  # the second sample does not train
    made.add({TOKEN_ADVANTAGES: own})
    made.set_sample_values(
        {"advantage": [-0.2] * 3, "sample_mask": [1.0, 0.0, 1.0], "token_scale": [1.5] * 3}
    )
    return made


@pytest.mark.parametrize(
    "cfg", [CONFIG, replace(CONFIG, use_kl_in_reward=True, reference_policy_kl_penalty=0.1)]
)
def test_training_with_the_advantages_of_tokens_differs_by_rounding(cfg: LossConfig) -> None:
    found = train(cfg, made=with_a_critic())
    assert found[Measured.loss_gradient_error] < 1e-5
    assert found[Measured.loss_error] < 1e-5
    assert found[Measured.num_trained_tokens] == 2 * 4


@pytest.mark.parametrize("cfg", [CONFIG, GSPO], ids=["PPO", "GSPO"])
def test_terms_of_an_advantage_that_cancel_differ_by_rounding(cfg: LossConfig) -> None:
    # 0.7 - 0.3 x 7/3 is 0 but for the rounding of float32, which is no small part of what is left.
    errors = []
    for distance in torch.logspace(-8, -2, 200).tolist():
        made = with_a_critic()
        own = torch.full((8,), 7 / 3, dtype=torch.float64) + distance
        made.columns[TOKEN_ADVANTAGES.name] = own.float()
        made.set_sample_values(
            {"advantage": [0.7] * 3, "sample_mask": [1.0, 0.0, 1.0], "token_scale": [-0.3] * 3}
        )
        found = train(cfg, made=made)
        errors.append(found[Measured.loss_gradient_error])
        assert found[Measured.loss_error] < 2e-5
    assert 1e-6 < max(errors) < 2e-5


def test_advantages_of_tokens_that_were_left_out_are_noticed() -> None:
    made = with_a_critic()
    column = made.columns[TOKEN_ADVANTAGES.name]
    made.columns[TOKEN_ADVANTAGES.name] = torch.zeros(8)
    watch, metrics = UpdateWatch(CONFIG), TrainMetrics(CPU, num_replicas=1)
    loss = PolicyObjective(CONFIG, 1.0).loss_of_update(made, UPDATE, metrics)
    loss = watch.watched(loss, made, UPDATE, 0)
    made.columns[TOKEN_ADVANTAGES.name] = column  # which the loss never saw
    for spec in UPDATE.micro_batches:
        inputs = made.micro_batch(spec, Schedule((UPDATE,)))
        logprobs = torch.full((len(inputs.token_ids),), -1.0, requires_grad=True)
        loss(TokenScores(logprobs=logprobs), inputs).backward()
    assert watch.measured()[Measured.loss_gradient_error] > 0.1


@pytest.mark.parametrize("cfg", [CONFIG, GSPO, FULL], ids=["PPO", "GSPO", "all terms"])
@pytest.mark.parametrize("make", [batch, with_a_critic])
def test_training_with_punished_responses_differs_by_rounding(
    cfg: LossConfig, make: Callable[[], PolicyBatch]
) -> None:
    made = make()
    made.add({MESSAGE_FLAGS: np.array([0, 0, 2, 0, 3, 0, 1, 3], np.uint8)})
    punishing = replace(cfg, invalid_tool_call_advantage=-5.0, malformed_thinking_advantage=-2.0)
    found = train(punishing, made=made)
    assert found[Measured.loss_gradient_error] < 1e-5
    assert found[Measured.loss_error] < 1e-5


def test_a_penalty_that_was_left_out_is_noticed() -> None:
    made = batch()
    made.add({MESSAGE_FLAGS: np.array([0, 0, 2, 0, 0, 0, 0, 0], np.uint8)})
    watch, metrics = (
        UpdateWatch(replace(CONFIG, malformed_thinking_advantage=-2.0)),
        TrainMetrics(CPU, num_replicas=1),
    )
    loss = PolicyObjective(CONFIG, 1.0).loss_of_update(made, UPDATE, metrics)
    loss = watch.watched(loss, made, UPDATE, 0)
    for spec in UPDATE.micro_batches:
        inputs = made.micro_batch(spec, Schedule((UPDATE,)))
        logprobs = torch.full((len(inputs.token_ids),), -1.0, requires_grad=True)
        loss(TokenScores(logprobs=logprobs), inputs).backward()
    assert watch.measured()[Measured.loss_gradient_error] > 0.1
