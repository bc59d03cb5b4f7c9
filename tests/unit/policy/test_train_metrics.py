from __future__ import annotations

import pytest
import torch

from nemo_like.algorithms.losses import LossTerms, TokenMean
from nemo_like.observability.metrics import merge
from nemo_like.policy.loss.train_metrics import TrainMetrics


def terms(loss: float, ratio: list[float], mask: list[float]) -> LossTerms:
    ratios = torch.tensor(ratio)
    return LossTerms(
        loss=torch.tensor(loss),
        ratio=ratios,
        clipped_ratio=ratios.clamp(0.8, 1.2),
        means={"kl_penalty": TokenMean(ratios * 0.1, torch.tensor(mask))},
    )


def replica(
    *micro_batches: tuple[float, list[float], list[float]], grad_norm: float, num_replicas: int
) -> TrainMetrics:
    """Each micro-batch is (loss, ratios, mask)."""
    metrics = TrainMetrics(torch.device("cpu"), num_replicas)
    for loss, ratios, mask in micro_batches:
        metrics.add_micro_batch(terms(loss, ratios, mask), torch.tensor(mask))
    metrics.add_update(grad_norm=grad_norm, learning_rate=0.01)
    return metrics


def test_parts_of_two_replicas_merge_into_the_global_figures() -> None:
    first = replica((0.2, [1.0, 3.0], [1.0, 1.0]), grad_norm=2.0, num_replicas=2)
    second = replica((0.3, [0.5, 7.0], [1.0, 0.0]), grad_norm=2.0, num_replicas=2)
    merged = {name: metric.value for name, metric in merge([first.result(), second.result()]).items()}
    assert merged == pytest.approx(
        {
            "loss": 0.5,  # the update's loss is the sum of the replicas' parts
            "grad_norm": 2.0,
            "lr": 0.01,
            "probs_ratio": (1 + 3 + 0.5) / 3,
            "probs_ratio_clamped": (1 + 1.2 + 0.8) / 3,
            "kl_penalty": 0.1 * (1 + 3 + 0.5) / 3,
            "probs_ratio_max": 3.0,
            "probs_ratio_min": 0.5,
            "probs_ratio_clamped_max": 1.2,
            "probs_ratio_clamped_min": 0.8,
        }
    )


def test_a_skipped_update_counts_in_the_loss_and_not_in_the_gradient_norm() -> None:
    metrics = TrainMetrics(torch.device("cpu"), num_replicas=1)
    metrics.add_micro_batch(terms(0.1, [1.0], [1.0]), torch.tensor([1.0]))
    metrics.add_skipped_update()
    metrics.set_loss_scale(512.0, 1)
    assert not metrics.result().keys() & {"grad_norm", "lr"}
    metrics.add_micro_batch(terms(0.5, [1.0], [1.0]), torch.tensor([1.0]))
    metrics.add_update(grad_norm=3.0, learning_rate=0.01)
    metrics.set_loss_scale(512.0, 0)
    found = {name: metric.value for name, metric in metrics.result().items()}
    assert found["loss"] == pytest.approx(0.3)
    scaling = ("grad_norm", "loss_scale", "skipped_updates", "skipped_in_a_row")
    assert [found[name] for name in scaling] == [3.0, 512.0, 1.0, 0.0]


def test_loss_and_gradient_norm_are_means_over_updates() -> None:
    metrics = TrainMetrics(torch.device("cpu"), num_replicas=1)
    for loss, grad_norm in ((0.1, 1.0), (0.5, 3.0)):
        metrics.add_micro_batch(terms(loss, [1.0], [1.0]), torch.tensor([1.0]))
        metrics.add_update(grad_norm=grad_norm, learning_rate=0.01)
    result = metrics.result()
    assert result["loss"].value == pytest.approx(0.3)
    assert result["grad_norm"].value == pytest.approx(2.0)


def test_the_learning_rate_is_that_of_the_last_update_whatever_the_replicas() -> None:
    parts = [TrainMetrics(torch.device("cpu"), num_replicas=3) for _ in range(3)]
    for metrics in parts:
        for learning_rate in (0.2, 0.1, 0.03):
            metrics.add_update(grad_norm=1.0, learning_rate=learning_rate)
    assert merge([metrics.result() for metrics in parts])["lr"].value == 0.03


def test_a_replica_without_trained_tokens_has_no_say_in_the_extremes() -> None:
    idle = replica((0.0, [9.0], [0.0]), grad_norm=1.0, num_replicas=2)
    busy = replica((0.1, [1.1], [1.0]), grad_norm=1.0, num_replicas=2)
    merged = merge([idle.result(), busy.result()])
    assert merged["probs_ratio_max"].value == pytest.approx(1.1)
    assert merged["probs_ratio_min"].value == pytest.approx(1.1)


def test_micro_batches_without_tokens_change_nothing() -> None:
    metrics = replica((0.1, [1.1], [1.0]), (0.0, [], []), grad_norm=1.0, num_replicas=1)
    assert metrics.result()["probs_ratio"].value == pytest.approx(1.1)


def test_a_mean_counts_with_its_own_weights() -> None:
    metrics = replica((0.0, [1.0], [1.0]), grad_norm=1.0, num_replicas=1)
    # Two samples of 2 and 1 tokens, each counting once; the first is out of bounds.
    parts = TokenMean(torch.tensor([1.0, 1.0, 0.0]), torch.tensor([0.5, 0.5, 1.0]))
    metrics.add_means({"is_oob_ratio": parts})
    assert metrics.result()["is_oob_ratio"].value == pytest.approx(0.5)
    assert metrics.result()["is_oob_ratio"].weight == pytest.approx(2.0)


def test_what_no_micro_batch_had_is_not_reported() -> None:
    result = replica((0.1, [1.1], [1.0]), grad_norm=1.0, num_replicas=1).result()
    assert "entropy" not in result
    assert "gen_kl_error" not in result


def test_a_loss_that_is_normalised_later_is_scaled_alone() -> None:
    metrics = TrainMetrics(torch.device("cpu"), num_replicas=1)
    for loss, ratio in ((6.0, 1.0), (2.0, 3.0)):
        metrics.add_micro_batch(terms(loss, [ratio], [1.0]), torch.ones(1))
    metrics.scale_loss(0.25)
    metrics.add_update(grad_norm=2.0, learning_rate=0.01)
    metrics.add_micro_batch(terms(1.0, [2.0], [1.0]), torch.ones(1))
    metrics.add_update(grad_norm=2.0, learning_rate=0.01)
    found = {name: metric.value for name, metric in metrics.result().items()}
    assert found["loss"] == pytest.approx(((6 + 2) / 4 + 1) / 2)
    assert found["probs_ratio"] == pytest.approx(2.0)
    assert (found["probs_ratio_min"], found["probs_ratio_max"]) == (1.0, 3.0)
