"""Losses by hand: one or two tokens each, numbers worked out on paper."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.algorithms.losses import (
    GlobalCounts,
    LossTokens,
    clipped_policy_gradient,
    kl_to_reference,
    policy_loss,
    token_weights,
)
from nemo_like.config.schema import KLType, LossConfig

CONFIG = LossConfig(
    ratio_clip_min=0.2,
    ratio_clip_max=0.28,
    ratio_clip_c=None,
    token_level_loss=True,
    reference_policy_kl_penalty=0.0,
    reference_policy_kl_type=KLType.k3,
)


def tokens(ratios: list[float], advantages: list[float], weights: list[float] | None = None) -> LossTokens:
    """Tokens whose probability ratios to the previous policy are these."""
    logprobs = torch.tensor(ratios).log().requires_grad_()
    return LossTokens(
        logprobs=logprobs,
        prev_logprobs=torch.zeros(len(ratios)),
        advantages=torch.tensor(advantages),
        weights=torch.ones(len(ratios)) if weights is None else torch.tensor(weights),
        mask=torch.ones(len(ratios)),
    )


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
    assert policy_loss(tokens([ratio], [advantage]), CONFIG).loss.item() == pytest.approx(expected)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_advantage_times_ratio() -> None:
    batch = tokens([1.5, 1.2], [2.0, 2.0])
    policy_loss(batch, CONFIG).loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -2.4])


def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely() -> None:
    ratio, clipped = torch.tensor([5.0, 5.0, 2.0]), torch.tensor([1.28, 1.28, 1.28])
    advantages = torch.tensor([-1.0, 1.0, -1.0])
    loss = clipped_policy_gradient(ratio, clipped, advantages, dual_clip=3.0)
    # -A r = 5 is cut to 3; a good token keeps its clipped gain; 2 is below the bound.
    assert loss.tolist() == pytest.approx([3.0, -1.28, 2.0])


def test_the_loss_is_the_weighted_sum_over_tokens() -> None:
    loss = policy_loss(tokens([1.0, 1.0], [2.0, -4.0], weights=[0.5, 0.25]), CONFIG).loss
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
    terms = policy_loss(batch, cfg)
    assert terms.kl.item() == pytest.approx(4.5)
    assert terms.loss.item() == pytest.approx(-2 + 0.1 * 4.5)


def weights_of(cfg: LossConfig) -> Tensor:
    """Samples of 1 and 3 tokens that train, one of 2 that does not; 10 tokens of 5 samples in all."""
    return token_weights(
        torch.tensor([0, 1, 1, 1, 2, 2]),
        torch.tensor([1.0, 1.0, 0.0]),
        torch.tensor([1.0, 3.0, 2.0]),
        GlobalCounts(num_tokens=10, num_samples=5),
        cfg,
    )


def test_token_level_gives_every_token_of_the_global_batch_the_same_weight() -> None:
    assert weights_of(CONFIG).tolist() == pytest.approx([0.1, 0.1, 0.1, 0.1, 0, 0])


def test_sequence_level_gives_every_sample_of_the_global_batch_the_same_weight() -> None:
    weights = weights_of(replace(CONFIG, token_level_loss=False))
    assert weights.tolist() == pytest.approx([1 / 5, 1 / 15, 1 / 15, 1 / 15, 0, 0])


def test_a_batch_without_trained_tokens_has_zero_loss_and_gradient() -> None:
    weights = token_weights(
        torch.tensor([0, 0]),
        torch.tensor([0.0]),
        torch.tensor([2.0]),
        GlobalCounts(num_tokens=0, num_samples=0),
        CONFIG,
    )
    batch = replace(tokens([1.1, 0.9], [1.0, 1.0]), weights=weights)
    loss = policy_loss(batch, CONFIG).loss
    loss.backward()
    assert loss.item() == 0
    assert batch.logprobs.grad.tolist() == [0, 0]


@settings(deadline=None, max_examples=40)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=2, max_size=6),
    cut=st.integers(0, 6),
    token_level=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_loss_and_gradient_do_not_depend_on_how_the_batch_is_cut(
    lengths: list[int], cut: int, token_level: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    cfg = replace(CONFIG, token_level_loss=token_level, reference_policy_kl_penalty=0.3, ratio_clip_c=2.0)
    mask = torch.randint(0, 2, (len(lengths),), generator=generator).float()
    counts = GlobalCounts(
        num_tokens=sum(length for length, valid in zip(lengths, mask, strict=True) if valid),
        num_samples=int(mask.sum()),
    )
    start = torch.randn(sum(lengths), generator=generator)
    prev, reference = torch.randn(2, sum(lengths), generator=generator)
    advantages = torch.randn(len(lengths), generator=generator)

    def loss_of(logprobs: Tensor, samples: range) -> Tensor:
        first = sum(lengths[: samples.start])
        here = slice(first, first + sum(lengths[index] for index in samples))
        sample_lengths = torch.tensor([lengths[index] for index in samples], dtype=torch.int64)
        index = torch.repeat_interleave(torch.arange(len(samples)), sample_lengths)
        own = slice(samples.start, samples.stop)
        batch = LossTokens(
            logprobs=logprobs[here],
            prev_logprobs=prev[here],
            advantages=advantages[own][index],
            weights=token_weights(index, mask[own], sample_lengths.float(), counts, cfg),
            mask=mask[own][index],
            reference_logprobs=reference[here],
        )
        return policy_loss(batch, cfg).loss

    cut = min(cut, len(lengths))
    whole, halves = start.clone().requires_grad_(), start.clone().requires_grad_()
    loss = loss_of(whole, range(len(lengths)))
    parts = loss_of(halves, range(cut)) + loss_of(halves, range(cut, len(lengths)))
    loss.backward()
    parts.backward()
    torch.testing.assert_close(loss, parts)
    torch.testing.assert_close(whole.grad, halves.grad)
