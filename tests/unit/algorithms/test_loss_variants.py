"""What may stand in place of PPO's clipped surrogate, and what is added to it, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, GSPO, of_kind, tokens

GSPO_TOKEN = of_kind("gspo_token", token_level_loss=False)


def test_gspo_has_one_ratio_per_sample_the_geometric_mean_over_its_tokens() -> None:
    # Sample 0: sqrt(1.1 * 0.9); sample 1: sqrt(2 * 0.5) = 1, though token by token both would be clipped.
    batch = tokens([1.1, 0.9, 2.0, 0.5], [1.0, 1.0, -3.0, -3.0], lengths=[2, 2])
    terms = compute(batch, GSPO)
    first = math.sqrt(0.99)
    assert terms.ratio.tolist() == pytest.approx([first, first, 1.0, 1.0])
    assert terms.loss.item() == pytest.approx(-2 * first + 2 * 3.0)


def test_gspo_gives_every_token_of_a_sample_the_same_gradient() -> None:
    batch = tokens([1.1, 0.9, 2.0, 1.0], [1.0, 1.0, 5.0, 5.0], lengths=[2, 2])
    compute(batch, GSPO).loss.backward()
    # Sample 0: two tokens of loss -s, and ds/dlogp = s / 2 for each token, so -s in all.
    # Sample 1: s = sqrt(2) is above 1.28: clipped as a whole.
    slope = -math.sqrt(0.99)
    assert batch.logprobs.grad.tolist() == pytest.approx([slope, slope, 0.0, 0.0])


def test_gspo_token_has_gspo_s_ratio_and_a_gradient_of_each_token_s_own() -> None:
    # s = sqrt(1.1 * 0.9), with the advantages 1 and 3; GSPO gives both tokens -s (1 + 3) / 2.
    batch = tokens([1.1, 0.9], [1.0, 3.0], lengths=[2])
    terms = compute(batch, GSPO_TOKEN)
    terms.loss.backward()
    s = math.sqrt(0.99)
    assert terms.loss.item() == pytest.approx(-4 * s)
    assert batch.logprobs.grad.tolist() == pytest.approx([-s, -3 * s])
    evenly = tokens([1.1, 0.9], [1.0, 3.0], lengths=[2])
    compute(evenly, GSPO).loss.backward()
    assert evenly.logprobs.grad.tolist() == pytest.approx([-2 * s, -2 * s])


def test_gspo_token_is_gspo_where_the_tokens_of_a_sample_have_one_advantage() -> None:
    ratios, advantages = [1.1, 0.9, 2.0, 1.0, 0.3], [1.0, 1.0, 5.0, 5.0, -2.0]
    of_tokens, of_samples = (tokens(ratios, advantages, lengths=[2, 2, 1]) for _ in range(2))
    first, second = compute(of_tokens, GSPO_TOKEN), compute(of_samples, GSPO)
    first.loss.backward()
    second.loss.backward()
    assert first.loss.item() == pytest.approx(second.loss.item())
    assert of_tokens.logprobs.grad.tolist() == pytest.approx(of_samples.logprobs.grad.tolist())


def test_gspo_token_has_no_gradient_beyond_the_limit_of_the_ratio() -> None:
    batch = tokens([1.0, 1.0], [-1.0, -1.0], lengths=[2], prev_logprobs=torch.tensor([-21.0, -21.0]))
    compute(batch, GSPO_TOKEN).loss.backward()
    assert batch.logprobs.grad.tolist() == [0.0, 0.0]


def test_sapo_s_gate_closes_softly_and_faster_for_losses() -> None:
    # p = sigmoid(tau (r - 1)) is 3/4 on the first token and 1/4 on the second; f = 4 p / tau.
    first, second = 1 + math.log(3), 1 - math.log(3) / 2
    batch = tokens([first, second], [1.0, -2.0])
    terms = compute(batch, of_kind("sapo", tau_pos=1.0, tau_neg=2.0))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-1.0 * 3 + 2.0 * 0.5)
    # d loss / d log p = -A 4 p (1 - p) r
    assert batch.logprobs.grad.tolist() == pytest.approx([-0.75 * first, 2 * 0.75 * second])


def test_sapo_has_reinforce_s_gradient_where_the_ratio_is_one() -> None:
    batch = tokens([1.0, 1.0], [1.5, -2.0])
    terms = compute(batch, of_kind("sapo"))
    terms.loss.backward()
    # f(1) = 2 / tau
    assert terms.loss.item() == pytest.approx(-1.5 * 2 + 2.0 * 2 / 1.05)
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.5, 2.0])


def test_cispo_clips_a_tokens_weight_and_keeps_its_gradient() -> None:
    batch = tokens([2.0, 0.5, 1.1], [1.0, 1.0, -2.0])
    terms = compute(batch, of_kind("cispo"))
    terms.loss.backward()
    # -A clip(r) log p, with log p = log r here; the gradient is -A clip(r): 1.28, 0.8 and 1.1.
    expected = -1.28 * math.log(2) - 0.8 * math.log(0.5) + 2 * 1.1 * math.log(1.1)
    assert terms.loss.item() == pytest.approx(expected)
    assert batch.logprobs.grad.tolist() == pytest.approx([-1.28, -0.8, 2.2])


def test_reinforce_knows_no_ratio() -> None:
    batch = tokens([math.exp(-2), math.exp(-0.5)], [3.0, -1.0])
    terms = compute(batch, of_kind("reinforce"))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(3 * 2 - 0.5)
    assert batch.logprobs.grad.tolist() == pytest.approx([-3.0, 1.0])


def test_without_prev_logprobs_the_ratio_is_one_and_the_gradient_is_minus_the_advantage() -> None:
    logprobs = torch.tensor([-1.0, -7.0], requires_grad=True)
    batch = tokens([1.0, 1.0], [2.0, -3.0], logprobs=logprobs, prev_logprobs=logprobs.detach())
    terms = compute(batch, CONFIG)
    terms.loss.backward()
    assert terms.ratio.tolist() == [1.0, 1.0]
    assert terms.loss.item() == pytest.approx(-2 + 3)
    assert logprobs.grad.tolist() == pytest.approx([-2.0, 3.0])


def test_the_entropy_bonus_enters_with_its_coefficient_and_the_weights_of_the_loss() -> None:
    entropy = torch.tensor([2.0, 0.5], requires_grad=True)
    batch = tokens([1.0, 1.0], [0.0, 0.0], entropy=entropy, weights=torch.tensor([0.25, 0.75]))
    terms = compute(batch, replace(CONFIG, entropy_coef=0.1))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.1 * (0.25 * 2 + 0.75 * 0.5))
    assert entropy.grad.tolist() == pytest.approx([-0.025, -0.075])
    assert terms.means["entropy"].values.tolist() == [2.0, 0.5]


def test_a_coefficient_of_zero_reports_the_entropy_and_changes_no_gradient() -> None:
    entropy = torch.tensor([2.0], requires_grad=True)
    batch = tokens([1.1], [1.0], entropy=entropy)
    terms = compute(batch, replace(CONFIG, entropy_coef=0.0))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-1.1)
    assert entropy.grad.tolist() == [0.0]
    assert terms.means["entropy"].values.tolist() == [2.0]
