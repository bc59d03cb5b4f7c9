"""Losses by hand: one or two tokens each, numbers worked out on paper."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.algorithms.losses import (
    GlobalCounts,
    clipped_policy_gradient,
    kl_to_reference,
    token_weights,
)
from nemo_like.algorithms.options import KLType, LossConfig
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind, tokens


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"),
    [
        (1.0, 2.0, -2.0),
        (1.5, 2.0, -2.56),  # clipped at 1.28: -2 * 1.28
        (0.5, 2.0, -1.0),  # a gain is not clipped from below
        (0.5, -1.0, 0.8),  # clipped at 0.8
        (1.5, -1.0, 1.5),  # a loss is not clipped from above
    ],
)
def test_clipping_stops_gains_at_the_range_and_never_losses(
    ratio: float, advantage: float, expected: float
) -> None:
    assert compute(tokens([ratio], [advantage]), CONFIG).loss.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_advantage_times_ratio() -> None:
    batch = tokens([1.5, 1.2], [2.0, 2.0])
    compute(batch, CONFIG).loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -2.4])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    ratio, clipped = torch.tensor([5.0, 5.0, 2.0]), torch.tensor([1.28, 1.28, 1.28])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    loss = clipped_policy_gradient(ratio, clipped, advantages, dual_clip=3.0)
    # -A r = 5 is cut to 3; a good token keeps its clipped gain; 2 is below the bound.
    assert loss.tolist() == pytest.approx([3.0, -1.28, 2.0])


def test_the_loss_is_the_weighted_sum_over_tokens() -> None:
    batch = tokens([1.0, 1.0], [2.0, -4.0], weights=torch.tensor([0.5, 0.25]))
    loss = compute(batch, CONFIG).loss
    assert loss.item() == pytest.approx(-2 * 0.5 + 4 * 0.25)


X = math.log(2)  # reference twice as likely as the policy


@pytest.mark.parametrize(
    ("kind", "value", "gradient"),
    [
        # d/dlogp of the estimate, plus the estimate itself from the score-function factor
        (KLType.k1, -X, 1 - X),
        (KLType.k2, X**2 / 2, -X + X**2 / 2),
        (KLType.k3, 2 - 1 - X, (1 - 2) + (1 - X)),
    ],
)
def test_kl_estimators_and_their_gradients(kind: KLType, value: float, gradient: float) -> None:
    logprobs = torch.tensor([-3.0], requires_grad=True)
    kl = kl_to_reference(logprobs, torch.tensor([-3.0 + X]), kind)
    kl.backward()
    assert kl.item() == pytest.approx(value, abs=1e-6)
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


def test_kl_estimates_are_limited_to_ten_and_their_log_ratio_to_twenty() -> None:
    policy = torch.tensor([0.0, 0.0, -40.0])
    reference = torch.tensor([-30.0, -3.0, 0.0])
    assert kl_to_reference(policy, reference, KLType.k1).tolist() == pytest.approx([10.0, 3.0, -10.0])
    assert kl_to_reference(policy, reference, KLType.k2).tolist() == pytest.approx([10.0, 4.5, 10.0])
    # k3 of x = -20: e^-20 - 1 + 20 = 19, limited to 10
    assert kl_to_reference(policy, reference, KLType.k3).tolist() == pytest.approx(
        [10.0, math.exp(-3) + 2, 10.0]
    )


def test_the_kl_penalty_enters_with_its_coefficient_and_is_reported_without() -> None:
    cfg = replace(CONFIG, reference_policy_kl_penalty=0.1, reference_policy_kl_type=KLType.k2)
    batch = replace(tokens([1.0], [2.0]), reference_logprobs=torch.tensor([3.0]))
    terms = compute(batch, cfg)
    assert terms.means["kl_penalty"].values.item() == pytest.approx(4.5)
    assert terms.loss.item() == pytest.approx(-2 + 0.1 * 4.5)


COUNTS = GlobalCounts(num_tokens=10, num_samples=5)


def weights_of(cfg: LossConfig, counts: GlobalCounts = COUNTS) -> Tensor:
    """Samples of 1 and 3 tokens that train, one of 2 that does not; 10 tokens of 5 samples in all."""
    return token_weights(
        torch.tensor([0, 1, 1, 1, 2, 2]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([1.0, 3.0, 2.0]),
        counts,
        cfg,
    )


def test_token_level_gives_every_token_of_the_global_batch_the_same_weight() -> None:
    assert weights_of(CONFIG).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0, 0])


def test_sequence_level_gives_every_sample_of_the_global_batch_the_same_weight() -> None:
    weights = weights_of(replace(CONFIG, token_level_loss=False))
    assert weights.tolist() == pytest.approx([1 / 5, 1 / 15, 1 / 15, 1 / 15, 0, 0])


def test_dr_grpo_divides_a_samples_token_sum_by_a_constant() -> None:
    weights = weights_of(replace(CONFIG, token_level_loss=False, sequence_length_normalizer=4))
    assert weights.tolist() == pytest.approx([1 / 20, 1 / 20, 1 / 20, 1 / 20, 0, 0])


@pytest.mark.parametrize(
    ("cfg", "of_one", "share"),
    [
        (CONFIG, [1, 1, 1, 1, 0, 0], 0.1),
        (replace(CONFIG, token_level_loss=False), [1, 1 / 3, 1 / 3, 1 / 3, 0, 0], 0.2),
        (
            replace(CONFIG, token_level_loss=False, sequence_length_normalizer=4),
            [1 / 4, 1 / 4, 1 / 4, 1 / 4, 0, 0],
            0.2,
        ),
    ],
)
def test_weights_by_counts_of_one_times_the_share_are_those_by_the_counts(
    cfg: LossConfig, of_one: list[float], share: float
) -> None:
    by_one = weights_of(cfg, GlobalCounts(num_tokens=1, num_samples=1))
    assert by_one.tolist() == pytest.approx(of_one)
    found = COUNTS.share(is_token_level=cfg.token_level_loss)
    assert found == pytest.approx(share)
    torch.testing.assert_close(by_one * found, weights_of(cfg), rtol=2e-7, atol=0)


def test_no_trained_token_at_all_has_a_finite_share() -> None:
    none = GlobalCounts(num_tokens=0, num_samples=0)
    assert 0 * none.share(is_token_level=True) == 0 * none.share(is_token_level=False) == 0


def test_a_batch_without_trained_tokens_has_zero_loss_and_gradient() -> None:
    weights = token_weights(
        torch.tensor([0, 0]),
        torch.tensor([0.0]),
        torch.tensor([2.0]),
        GlobalCounts(num_tokens=0, num_samples=0),
        CONFIG,
    )
    batch = replace(tokens([1.1, 0.9], [1.0, 1.0]), weights=weights)
    loss = compute(batch, CONFIG).loss
    loss.backward()
    assert loss.item() == 0
    assert batch.logprobs.grad.tolist() == [0, 0]


def clip_fractions(
    ratios: list[float], advantages: list[float], cfg: LossConfig, **changes: Any
) -> list[float]:
    """The low and the high one of a micro-batch."""
    means = compute(tokens(ratios, advantages, **changes), cfg).means
    parts = [means["clip_fraction_low"], means["clip_fraction_high"]]
    return [float((one.values * one.weights).sum() / one.weights.sum()) for one in parts]


# Below, within and above the range of 0.8 to 1.28, for a good, a bad and an indifferent token.
RATIOS = [0.5, 1.0, 1.5] * 3
ADVANTAGES = [1.0] * 3 + [-1.0] * 3 + [0.0] * 3


@pytest.mark.parametrize(
    ("cfg", "low", "high"),
    [
        (CONFIG, 1, 1),  # a bad token below, a good one above
        (of_kind("policy_gradient", ratio_clip_c=1.4), 1, 2),  # and a bad one above 1.4
        (of_kind("policy_gradient", ratio_clip_c=1.6), 1, 1),
        (of_kind("cispo"), 2, 2),  # good and bad ones, below and above
    ],
)
def test_a_clip_holds_where_it_takes_gradient_or_weight_away(cfg: LossConfig, low: int, high: int) -> None:
    assert clip_fractions(RATIOS, ADVANTAGES, cfg) == pytest.approx([low / 9, high / 9])
    mask = torch.tensor([1.0] * 6 + [0.0] * 3)
    assert clip_fractions(RATIOS, ADVANTAGES, cfg, mask=mask) == pytest.approx([low / 6, high / 6])


def test_gspo_clips_all_tokens_of_a_sample_or_none() -> None:
    # The geometric means are 0.5 and 2: the first, bad sample is below the range, the second above it.
    found = clip_fractions([0.25, 1.0, 2.0, 2.0, 2.0], [-1.0, -1.0, 1.0, 1.0, 1.0], GSPO, lengths=[2, 3])
    assert found == pytest.approx([2 / 5, 3 / 5])
    per_token = compute(tokens([0.25, 1.0], [-1.0, -1.0], lengths=[2]), of_kind("gspo_token"))
    assert per_token.means["clip_fraction_low"].values.tolist() == [1.0, 1.0]
    assert per_token.means["clip_fraction_high"].values.tolist() == [0.0, 0.0]


def test_a_loss_that_does_not_clip_has_no_clip_fractions() -> None:
    batch = tokens([1.5], [1.0])
    for kind in ("reinforce", "sapo"):
        terms = compute(batch, of_kind(kind))
        assert not {"clip_fraction_low", "clip_fraction_high"} & terms.means.keys()
        assert terms.clipped_ratio.tolist() == terms.ratio.tolist() == [1.5]


@given(
    st.lists(st.tuples(st.floats(0.1, 4.0), st.sampled_from([-1.5, -0.5, 0.5, 2.0])), min_size=1, max_size=8),
    st.sampled_from([None, 1.1, 3.0]),
)
def test_the_tokens_that_a_clip_holds_are_those_without_a_gradient(
    drawn: list[tuple[float, float]], dual_clip: float | None
) -> None:
    # The lower bound is not exact in float32, the upper one and the dual clip's are not either.
    bounds = [0.8, 1.28, *([dual_clip] if dual_clip else [])]
    assume(all(abs(ratio - bound) > 1e-3 for ratio, _ in drawn for bound in bounds))
    batch = tokens(*map(list, zip(*drawn, strict=True)))
    terms = compute(batch, of_kind("policy_gradient", ratio_clip_c=dual_clip))
    terms.loss.backward()
    held = terms.means["clip_fraction_low"].values + terms.means["clip_fraction_high"].values
    assert held.tolist() == [float(gradient == 0) for gradient in batch.logprobs.grad.tolist()]
