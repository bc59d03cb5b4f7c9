"""Importance weights by hand: three tokens of which the trainer thinks 1/4, 1 and 4 times as much."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.importance_sampling import (
    ImportanceCorrection,
    importance_correction,
    sample_means,
)
from nemo_like.algorithms.options import ImportanceSamplingType, LossConfig
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, sample_index, tokens

CORRECTED = replace(CONFIG, use_importance_sampling_correction=True)
CORRECTED_GSPO = replace(GSPO, use_importance_sampling_correction=True)


def bounded(
    kind: ImportanceSamplingType, low: float | None, high: float | None, cfg: LossConfig = CORRECTED
) -> LossConfig:
    return replace(
        cfg,
        truncated_importance_sampling_type=kind,
        truncated_importance_sampling_ratio_min=low,
        truncated_importance_sampling_ratio=high,
    )


def correction_of(ratios: list[float], lengths: list[int], cfg: LossConfig) -> ImportanceCorrection:
    """The correction where trainer and engine probabilities have these ratios."""
    generation = torch.full((len(ratios),), -3.0)
    prev = generation + torch.tensor(ratios).log()
    return importance_correction(
        prev, generation, sample_index(lengths), torch.tensor(lengths, dtype=torch.float32), cfg
    )


def test_unbounded_weights_are_the_ratios_themselves() -> None:
    found = correction_of([0.25, 1.0, 4.0], [3], CORRECTED)
    assert found.weights.tolist() == pytest.approx([0.25, 1.0, 4.0])
    assert found.is_out_of_bounds.tolist() == [0, 0, 0]


def test_tis_clamps_above_and_below_where_asked() -> None:
    above = correction_of([0.25, 1.0, 4.0], [3], bounded(ImportanceSamplingType.tis, None, 2.0))
    assert above.weights.tolist() == pytest.approx([0.25, 1.0, 2.0])
    assert above.is_out_of_bounds.tolist() == [0, 0, 1]
    both = correction_of([0.25, 1.0, 4.0], [3], bounded(ImportanceSamplingType.tis, 0.5, 2.0))
    assert both.weights.tolist() == pytest.approx([0.5, 1.0, 2.0])
    assert both.is_out_of_bounds.tolist() == [1, 0, 1]


def test_icepop_leaves_out_the_tokens_outside_the_bounds() -> None:
    found = correction_of([0.25, 0.6, 4.0], [3], bounded(ImportanceSamplingType.icepop, 0.5, 2.0))
    assert found.weights.tolist() == pytest.approx([0.0, 0.6, 0.0])
    assert found.is_out_of_bounds.tolist() == [1, 0, 1]


def test_seq_mask_judges_a_sample_by_its_geometric_mean_and_keeps_the_raw_weights_of_the_rest() -> None:
    # Sample 0: sqrt(4 * 1/4) = 1 is within; sample 1: cbrt(2 * 2 * 2) = 2 is not.
    found = correction_of(
        [4.0, 0.25, 2.0, 2.0, 2.0], [2, 3], bounded(ImportanceSamplingType.seq_mask, 0.5, 1.5)
    )
    assert found.weights.tolist() == pytest.approx([4.0, 0.25, 0.0, 0.0, 0.0])
    # One sample of two is out of bounds, although three tokens of five are.
    share = (found.is_out_of_bounds * found.counts).sum() / found.counts.sum()
    assert share.item() == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("cfg", "expected", "outside"),
    [
        # Products: 4 * 1/4 = 1, 1 * 2 * 4 = 8, 1/4.
        (CORRECTED_GSPO, [1, 1, 8, 8, 8, 0.25], [0, 0, 0]),
        (
            bounded(ImportanceSamplingType.tis, None, 1.5, CORRECTED_GSPO),
            [1, 1, 1.5, 1.5, 1.5, 0.25],
            [0, 1, 0],
        ),
        (
            bounded(ImportanceSamplingType.tis, 0.5, 1.5, CORRECTED_GSPO),
            [1, 1, 1.5, 1.5, 1.5, 0.5],
            [0, 1, 1],
        ),
        (bounded(ImportanceSamplingType.icepop, 0.5, 9.0, CORRECTED_GSPO), [1, 1, 8, 8, 8, 0], [0, 0, 1]),
    ],
)
def test_gspo_has_one_weight_per_sample_the_product_over_its_tokens(
    cfg: LossConfig, expected: list[float], outside: list[float]
) -> None:
    found = correction_of([4.0, 0.25, 1.0, 2.0, 4.0, 0.25], [2, 3, 1], cfg)
    assert found.weights.tolist() == pytest.approx(expected)
    # Each sample counts once in the share that is out of bounds, however long it is.
    samples = sample_index([2, 3, 1])
    shares = torch.zeros(3).index_add(0, samples, found.is_out_of_bounds * found.counts)
    assert shares.tolist() == pytest.approx(outside)


def test_gspo_weighs_the_loss_of_a_sample_as_a_whole() -> None:
    batch = tokens(
        [1.1, 1.1, 1.0],
        [1.0, 1.0, -2.0],
        lengths=[2, 1],
        prev_logprobs=torch.tensor([0.0, 0.0, 0.0]),
        generation_logprobs=-torch.tensor([4.0, 1.0, 3.0]).log(),
    )
    # Weights 4 * 1 and 3; ratios 1.1 and 1.
    loss = compute(batch, CORRECTED_GSPO).loss
    assert loss.item() == pytest.approx(4 * (-1.1 - 1.1) + 3 * 2.0)


def test_a_token_that_one_side_finds_impossible_has_a_finite_weight() -> None:
    found = correction_of([math.exp(60), math.exp(-60)], [2], CORRECTED)
    assert found.weights.tolist() == pytest.approx([math.exp(20), math.exp(-20)], rel=1e-5)


def test_the_weights_multiply_the_policy_gradient_and_neither_the_kl_nor_the_entropy() -> None:
    cfg = replace(CORRECTED, reference_policy_kl_penalty=1.0, entropy_coef=1.0)
    logprobs = torch.tensor([math.log(0.5)], requires_grad=True)
    batch = tokens(
        [1.0],
        [3.0],
        logprobs=logprobs,
        prev_logprobs=logprobs.detach(),
        generation_logprobs=torch.tensor([math.log(0.25)]),
        reference_logprobs=torch.tensor([math.log(0.25)]),
        entropy=torch.tensor([0.7]),
    )
    terms = compute(batch, cfg)
    kl = 0.5 - 1 + math.log(2)  # k3 of log(1/2)
    assert terms.loss.item() == pytest.approx(-3.0 * 2 + kl - 0.7)
    assert terms.means["is_oob_ratio"].values.tolist() == [0.0]


def test_the_weights_carry_no_gradient() -> None:
    generation = torch.tensor([-2.0, -2.0])
    batch = tokens([1.0, 1.0], [1.0, -1.0], generation_logprobs=generation)
    compute(batch, CORRECTED).loss.backward()
    # w = e^2 for both; d(-A r)/dlogp = -A r, and r = 1.
    assert batch.logprobs.grad.tolist() == pytest.approx([-math.exp(2), math.exp(2)])


def test_sample_means_spread_each_samples_mean_over_its_tokens() -> None:
    values = torch.tensor([1.0, 5.0, 4.0], requires_grad=True)
    means: Tensor = sample_means(values, sample_index([2, 1]), torch.tensor([2.0, 1.0]))
    assert means.tolist() == [3.0, 3.0, 4.0]
    means[0].backward()
    assert values.grad.tolist() == [0.5, 0.5, 0.0]
