"""From scores to loss and metrics: which columns are compared, and what a masked sample may hold."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.losses import LossTerms, LossTokens, TokenMean, logs
from nemo_like.algorithms.options import KLType, LossConfig
from nemo_like.batch.columns import Column, Layout, reads, teacher_topk_columns
from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.batch.policy_columns import training_reads
from nemo_like.policy.loss.checked_loss import LossFailed, own_means, own_reads
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.loss.token_advantages import reward_kl_tags
from nemo_like.policy.loss.train_metrics import TrainMetrics
from tests.losses import clipped_loss
from tests.unit.algorithms.loss_cases import CONFIG, of_kind

CPU = torch.device("cpu")
MICRO_BATCH = MicroBatch(rows=(0, 1), padded_length=3)


def batch_of(**columns: list[float]) -> PolicyBatch:
    """Two samples of a prompt token and 2 and 1 response tokens; the second does not train."""
    arrays: dict[str, Any] = {name: np.array(values, np.float32) for name, values in columns.items()}
    arrays["input_ids"] = np.array([5, 6, 7, 8, 9], np.int32)
    arrays["response_mask"] = np.array([0, 1, 1, 0, 1], np.uint8)
    tags = {"advantage": [2.0, 1.0], "sample_mask": [1.0, 0.0], "kl_scale": [0.5, 0.5]}
    return PolicyBatch(arrays, [3, 2], tags, CPU)


def run(cfg: LossConfig, batch: PolicyBatch) -> tuple[float, list[float], dict[str, float]]:
    """Loss, its gradient by token, and metrics; the model gives every token a log-prob of -1."""
    metrics = TrainMetrics(CPU, num_replicas=1)
    loss, grad = one_update(cfg, batch, metrics, logprob=-1.0)
    values = {name: metric.value for name, metric in metrics.result().items()}
    return loss, grad, values


def one_update(
    cfg: LossConfig, batch: PolicyBatch, metrics: TrainMetrics, *, logprob: float
) -> tuple[float, list[float]]:
    """Loss and its gradient by token, where the model gives every token this log-prob."""
    update = GlobalBatch(num_samples=1, num_tokens=2, micro_batches=(MICRO_BATCH,))
    logprobs = torch.full((3,), logprob, requires_grad=True)
    loss = PolicyObjective(cfg, 1.0).loss_of_update(batch, update, metrics)(
        TokenScores(logprobs=logprobs), batch.micro_batch(MICRO_BATCH, Schedule((update,)))
    )
    loss.backward()
    metrics.add_update(grad_norm=1.0, learning_rate=0.1)
    return loss.item(), logprobs.grad.tolist()


def test_scores_meet_the_previous_logprobs_of_their_own_tokens() -> None:
    prev = [0.0, -1.0, -1.0 - np.log(1.1), 0.0, -3.0]
    loss, grad, metrics = run(CONFIG, batch_of(prev_logprobs=prev))
    assert loss == pytest.approx(-2 * (1 + 1.1) / 2)
    assert grad == pytest.approx([-1.0, -1.1, 0.0])
    assert metrics["probs_ratio"] == pytest.approx(1.05)
    assert "gen_kl_error" not in metrics


def test_a_distillation_loss_gets_the_students_logprobs_of_the_teachers_tokens() -> None:
    # Two tokens have the whole vocabulary between them, so the tail counts nothing.
    cfg = of_kind("distillation", divergence="forward", top_k=2)
    teacher, student = np.log([0.75, 0.25]).astype(np.float32), torch.full((3, 2), 0.5).log()
    columns = {
        "input_ids": np.array([5, 6, 7, 8, 9], np.int32),
        "response_mask": np.array([0, 1, 1, 0, 1], np.uint8),
        "prev_logprobs": np.full(5, -1.0, np.float32),
        "teacher_topk_ids": np.zeros((5, 2), np.int32),
        "teacher_topk_logprobs": np.tile(teacher, (5, 1)),
    }
    tags = {"advantage": [2.0, 1.0], "sample_mask": [1.0, 0.0]}
    batch, metrics = PolicyBatch(columns, [3, 2], tags, CPU), TrainMetrics(CPU, 1, own_means(cfg))
    update = GlobalBatch(num_samples=1, num_tokens=2, micro_batches=(MICRO_BATCH,))
    loss = PolicyObjective(cfg, 1.0).loss_of_update(batch, update, metrics)(
        TokenScores(logprobs=torch.full((3,), -1.0, requires_grad=True), topk_logprobs=student),
        batch.micro_batch(MICRO_BATCH, Schedule((update,))),
    )
    metrics.add_update(grad_norm=1.0, learning_rate=0.1)
    expected = 0.75 * np.log(1.5) + 0.25 * np.log(0.5)
    assert loss.item() == pytest.approx(expected, abs=1e-5)
    assert metrics.result()["teacher_divergence"].value == pytest.approx(expected, abs=1e-5)


def test_a_masked_sample_whose_logprobs_are_no_numbers_spoils_nothing() -> None:
    loss, grad, metrics = run(CONFIG, batch_of(prev_logprobs=[0.0, -1.0, -1.0, 0.0, np.nan]))
    assert loss == pytest.approx(-2.0)
    assert grad == pytest.approx([-1.0, -1.0, 0.0])
    assert metrics["probs_ratio_max"] == pytest.approx(1.0)


def test_on_policy_training_needs_no_previous_logprobs_and_compares_with_the_engine_itself() -> None:
    cfg = replace(CONFIG, force_on_policy_ratio=True)
    generation = [0.0, -1.0, -1.0 - np.log(2), 0.0, -9.0]
    loss, grad, metrics = run(cfg, batch_of(generation_logprobs=generation))
    assert loss == pytest.approx(-2.0)
    assert grad == pytest.approx([-1.0, -1.0, 0.0])
    assert metrics["token_mult_prob_error"] == pytest.approx((1 + 2) / 2)
    assert metrics["sampling_importance_ratio"] == pytest.approx((1 + 2) / 2)


def test_the_ratio_can_be_to_what_was_sampled_with_and_only_the_first_update_compares_with_it() -> None:
    cfg = replace(CONFIG, use_generation_logprobs_as_prev=True)
    batch = batch_of(generation_logprobs=[0.0, -1.0, -1.0 - np.log(1.1), 0.0, np.nan])
    metrics = TrainMetrics(CPU, num_replicas=1)
    for _ in range(2):
        loss, grad = one_update(cfg, batch, metrics, logprob=-1.0)
        assert loss == pytest.approx(-2 * (1 + 1.1) / 2)
        assert grad == pytest.approx([-1.0, -1.1, 0.0])
    one_update(cfg, batch, metrics, logprob=-9.0)
    values = {name: metric.value for name, metric in metrics.result().items()}
    assert values["probs_ratio_max"] == pytest.approx(1.1)
    assert values["probs_ratio_min"] == pytest.approx(np.exp(-8))
    assert values["token_mult_prob_error"] == pytest.approx((1 + 1.1) / 2)


def test_the_correction_compares_previous_with_generation_logprobs() -> None:
    cfg = replace(CONFIG, use_importance_sampling_correction=True)
    batch = batch_of(
        prev_logprobs=[0.0, -1.0, -1.0, 0.0, -1.0],
        generation_logprobs=[0.0, -1.0, -1.0 - np.log(2), 0.0, 0.0],
    )
    loss, grad, metrics = run(cfg, batch)
    assert loss == pytest.approx(-2 * (1 + 2) / 2)
    assert grad == pytest.approx([-1.0, -2.0, 0.0])
    assert metrics["is_oob_ratio"] == 0


KL_IN_REWARD = replace(
    CONFIG, use_kl_in_reward=True, reference_policy_kl_penalty=0.1, reference_policy_kl_type=KLType.k1
)


def test_with_a_kl_in_the_reward_a_token_loses_the_kl_of_itself_and_of_what_follows() -> None:
    # KL of the first sample's tokens: 0.5 and 2, so 2.5 and 2 to go; advantages 2 - 2.5 / 2 and 2 - 2 / 2.
    batch = batch_of(prev_logprobs=[0, -1, -1, 0, np.nan], reference_logprobs=[0, -1.5, -3, 0, -1])
    loss, grad, metrics = run(KL_IN_REWARD, batch)
    assert loss == pytest.approx(-(0.75 + 1.0) / 2)
    assert grad == pytest.approx([-0.375, -0.5, 0.0])
    assert metrics["kl_penalty"] == pytest.approx((0.5 + 2.0) / 2)


def test_scoring_sums_the_kl_to_go_and_its_square_over_each_sample() -> None:
    batch = batch_of(prev_logprobs=[0, -1, -1, 0, -2], reference_logprobs=[0, -1.5, -3, 0, -1])
    tags = reward_kl_tags(batch, KLType.k1)
    assert tags["kl_to_go_sum"] == pytest.approx([2.5 + 2.0, -1.0])
    assert tags["kl_to_go_square_sum"] == pytest.approx([2.5**2 + 2.0**2, 1.0])


@pytest.mark.parametrize(
    ("changes", "columns"),
    [
        ({}, {"prev_logprobs"}),
        ({"force_on_policy_ratio": True}, {"generation_logprobs"}),
        ({"use_generation_logprobs_as_prev": True}, {"generation_logprobs"}),
        ({"use_importance_sampling_correction": True}, {"prev_logprobs", "generation_logprobs"}),
        ({"reference_policy_kl_penalty": 0.1}, {"prev_logprobs", "reference_logprobs"}),
    ],
)
def test_training_fetches_the_columns_that_its_loss_needs(changes: dict[str, Any], columns: set[str]) -> None:
    reads = {column.name for column in training_reads(replace(CONFIG, **changes))}
    assert reads == columns | {"input_ids", "response_mask"}


CREDIT = Column("credit", "float32", Layout.per_token)
TOPK_IDS, _ = teacher_topk_columns(2)


@reads(CREDIT)
def own_loss(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return clipped_loss(replace(tokens, advantages=tokens.advantages * tokens.columns["credit"]), cfg)


@logs("credit")
@reads(CREDIT)
def logged(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    terms = clipped_loss(tokens, cfg)
    return replace(terms, means={**terms.means, "credit": TokenMean(tokens.columns["credit"], tokens.mask)})


def unannounced(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    terms = clipped_loss(tokens, cfg)
    return replace(terms, means={"mine": TokenMean(tokens.mask, tokens.mask)})


def wrong_weights(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    terms = clipped_loss(tokens, cfg)
    return replace(terms, means={"entropy": TokenMean(tokens.mask, tokens.mask[:1])})


def no_tensor(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=1.0)  # type: ignore[arg-type]


def no_terms(tokens: LossTokens, cfg: LossConfig) -> Any:
    return tokens.logprobs.sum()


def per_token(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.logprobs)


def not_finite(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.logprobs.sum() * torch.nan)


def no_gradient(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.advantages.sum())


@reads(CREDIT)
def misspelt(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return replace(clipped_loss(tokens, cfg), loss=tokens.columns["credti"].sum())


def raising(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    return 1 // 0  # type: ignore[return-value]


@reads(CREDIT)
def root(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    values = (tokens.logprobs * tokens.columns["credit"]).abs().sqrt()
    return replace(clipped_loss(tokens, cfg), loss=(tokens.weights * values).sum())


@reads(CREDIT)
def logarithm(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    values = tokens.columns["credit"].log() * tokens.logprobs
    return replace(clipped_loss(tokens, cfg), loss=torch.where(tokens.mask > 0, values, 0.0).sum())


def scaled(tokens: LossTokens, cfg: LossConfig, factor: float = 1.0) -> LossTerms:
    terms = clipped_loss(tokens, cfg)
    return replace(terms, loss=factor * terms.loss)


def own(name: str) -> LossConfig:
    return of_kind(f"{__name__}:{name}")


def test_a_loss_of_one_s_own_gets_the_columns_that_it_declares() -> None:
    assert own_reads(own("own_loss")) == (CREDIT,)
    assert own_reads(CONFIG) == ()
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.array([9, 0.5, 2, 9, 9], np.float32)})
    loss, grad, _ = run(own("own_loss"), batch)
    assert loss == pytest.approx(-2 * (0.5 + 2) / 2)
    assert grad == pytest.approx([-0.5, -2.0, 0.0])


def test_a_loss_of_one_s_own_logs_means_that_it_announces() -> None:
    cfg = own("logged")
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.array([9, 0.5, 2, 9, 9], np.float32)})
    metrics = TrainMetrics(CPU, 1, own_means(cfg))
    one_update(cfg, batch, metrics, logprob=-1.0)
    assert metrics.result()["credit"].value == pytest.approx(1.25)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unannounced", r"gives the means \['mine'\], which it does not announce; mark it with"),
        ("wrong_weights", r"returned the shapes .*means\['entropy'\]\.weights.: \[1\]"),
        ("no_tensor", r"returned LossTerms\(loss=1\.0\), not LossTerms with a tensor"),
        ("no_terms", r"test_objective:no_terms returned Tensor, not LossTerms"),
        ("per_token", r"returned the shapes {'loss': \[3\]} for 3 tokens; the loss is a scalar"),
        ("not_finite", r"test_objective:not_finite returned a loss of nan"),
        ("no_gradient", r"returned a loss without a gradient; compute it from tokens.logprobs"),
        (
            "misspelt",
            r"raised KeyError .*does not read the column 'credti', only credit; did you mean 'credit'",
        ),
        ("raising", r"raised ZeroDivisionError \(test_objective.py:\d+\): "),
    ],
)
def test_a_wrong_loss_says_what_it_returned(name: str, message: str) -> None:
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.array([9, 0.5, 2, 9, 9], np.float32)})
    with pytest.raises(LossFailed, match=message):
        run(own(name), batch)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        # The slope of sqrt at 0 is infinite, and infinity times the credit of 0 is no number.
        ("root", r"gives a token's log-prob a gradient of nan, at generated token 2, where logprobs=-1, .*"),
        ("logarithm", r"returned a loss of inf, at generated token 2, where .*advantages=2, credit=0$"),
    ],
)
def test_what_is_not_finite_is_told_with_the_token_and_what_the_loss_read(name: str, message: str) -> None:
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.array([9, 0.5, 0, 9, 9], np.float32)})
    with pytest.raises(LossFailed, match=message) as caught:
        run(own(name), batch)
    assert caught.value.row == 0
    assert pickle.loads(pickle.dumps(caught.value)).row == 0


@reads(TOPK_IDS)
def distance(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """The slope of the root of a sum of squares is no number where all of them are 0."""
    assert tokens.topk_logprobs is not None
    values = (tokens.topk_logprobs - tokens.topk_logprobs.detach()).square().sum(1).sqrt()
    return replace(clipped_loss(tokens, cfg), loss=clipped_loss(tokens, cfg).loss + values.sum())


def test_a_gradient_by_another_input_that_is_not_finite_is_told_too() -> None:
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({TOPK_IDS: np.zeros((5, 2), np.int32)})
    update = GlobalBatch(num_samples=1, num_tokens=2, micro_batches=(MICRO_BATCH,))
    cfg = own("distance")
    loss = PolicyObjective(cfg, 1.0).loss_of_update(batch, update, metrics_of(cfg))(
        TokenScores(
            logprobs=torch.full((3,), -1.0, requires_grad=True),
            topk_logprobs=torch.full((3, 2), -0.5, requires_grad=True),
        ),
        batch.micro_batch(MICRO_BATCH, Schedule((update,))),
    )
    with pytest.raises(LossFailed, match="gives a token's topk_logprobs a gradient of nan, at generated tok"):
        loss.backward()


def test_a_loss_gets_the_arguments_of_the_configuration() -> None:
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    loss, grad, _ = run(replace(own("scaled"), arguments={"factor": 3.0}), batch)
    assert loss == pytest.approx(-6.0)
    assert grad == pytest.approx([-3.0, -3.0, 0.0])


def not_a_sum(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """Adds a term that no weight multiplies."""
    terms = clipped_loss(tokens, cfg)
    return replace(terms, loss=terms.loss + 0.1 * tokens.logprobs.square().mean())


@logs("surprise")
def weighed_mean(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    terms = clipped_loss(tokens, cfg)
    surprise = TokenMean(-tokens.logprobs.detach(), tokens.weights)
    return replace(terms, means={**terms.means, "surprise": surprise})


def in_part(cfg: LossConfig) -> float:
    """The loss of an accumulated part, which has the two samples."""
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.ones(5, np.float32)})
    part = GlobalBatch(num_samples=1, num_tokens=2, micro_batches=(MICRO_BATCH,)).unnormalised()
    objective = PolicyObjective(cfg, 1.0)
    metrics = TrainMetrics(CPU, 1, objective.own_means)
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    inputs = batch.micro_batch(MICRO_BATCH, Schedule((part,)))
    return objective.loss_of_update(batch, part, metrics)(TokenScores(logprobs=logprobs), inputs).item()


def test_an_own_loss_is_accumulated_where_it_is_a_weighted_sum() -> None:
    batch = batch_of(prev_logprobs=[-1.0] * 5)
    batch.add({CREDIT: np.ones(5, np.float32)})
    at_once, _ = one_update(own("own_loss"), batch, metrics_of(own("own_loss")), logprob=-1.0)
    assert in_part(own("own_loss")) == pytest.approx(2 * at_once)


def metrics_of(cfg: LossConfig) -> TrainMetrics:
    return TrainMetrics(CPU, 1, own_means(cfg))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("not_a_sum", "for twice the weights with which it gives .* must be the sum over tokens"),
        ("weighed_mean", r"weighs its mean 'surprise' by tokens\.weights; .* TokenMean"),
    ],
)
def test_an_own_loss_that_cannot_be_normalised_later_is_not_accumulated(name: str, said: str) -> None:
    with pytest.raises(LossFailed, match=said):
        in_part(own(name))
