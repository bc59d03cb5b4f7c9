"""What a loss leaves out, weighs or adds for tokens of other policies and for right answers, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, of_kind, tokens


def test_an_unlikely_sample_with_a_negative_advantage_has_no_gradient() -> None:
    # log pi_engine - log pi of the three samples: means 0.6, 0.6 and 0.4; the bound is 0.5.
    cfg = replace(CONFIG, off_policy_mask_threshold=0.5)
    gaps = [1.0, 0.2, 0.6, 0.4]
    batch = tokens([1.0] * 4, [-1.0, -1.0, 1.0, -1.0], lengths=[2, 1, 1])
    batch = replace(batch, generation_logprobs=torch.tensor(gaps))
    terms = compute(batch, cfg)
    terms.loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, -1.0, 1.0])
    assert terms.means["off_policy_masked"].values.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_an_unlikely_sample_still_has_the_gradient_of_its_kl() -> None:
    cfg = replace(CONFIG, off_policy_mask_threshold=0.5, reference_policy_kl_penalty=0.1)
    batch = replace(
        tokens([1.0], [-1.0]),
        generation_logprobs=torch.tensor([2.0]),
        reference_logprobs=torch.tensor([0.5]),
    )
    compute(batch, cfg).loss.backward()
    # x = 0.5: the score's part e^x - 1 - x, less the path's e^x - 1.
    assert batch.logprobs.grad.item() == pytest.approx(0.1 * -0.5)


def test_a_tokens_kl_is_weighed_by_how_much_likelier_it_is_now() -> None:
    # The engine gave half the probability of now: the weight is 2. k1 of x = 0.5 is -0.5.
    cfg = of_kind(
        reference_policy_kl_penalty=0.1,
        reference_policy_kl_type=CONFIG.reference_policy_kl_type.k1,
        use_on_policy_kl_approximation=True,
    )
    batch = replace(
        tokens([1.0], [0.0]),
        generation_logprobs=torch.tensor([math.log(0.5)]),
        reference_logprobs=torch.tensor([0.5]),
    )
    terms = compute(batch, cfg)
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(0.1 * 2 * -0.5)
    assert terms.means["kl_penalty"].values.tolist() == pytest.approx([-1.0])
    # The weight has no gradient: k1's own, 1, and the score's part, -0.5.
    assert batch.logprobs.grad.item() == pytest.approx(0.1 * 2 * 0.5)


def test_a_token_below_the_threshold_of_entropy_keeps_its_kl_alone() -> None:
    cfg = of_kind(top_entropy_quantile=0.5, reference_policy_kl_penalty=0.1)
    batch = replace(
        tokens([1.0, 1.0], [2.0, 2.0]),
        entropy_gate=torch.tensor([1.0, 0.0]),
        reference_logprobs=torch.tensor([0.0, 0.5]),
    )
    compute(batch, cfg).loss.backward()
    assert batch.logprobs.grad.tolist() == pytest.approx([-2.0, 0.1 * -0.5])


def test_a_coefficient_of_the_step_stands_in_for_the_configured_one() -> None:
    entropy = torch.tensor([2.0, 3.0], requires_grad=True)
    batch = replace(tokens([1.0, 1.0], [0.0, 0.0]), entropy=entropy, entropy_coefs=torch.full((2,), 0.1))
    terms = compute(batch, of_kind(entropy_coef=0.5, entropy_target=1.0))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.5)
    assert entropy.grad.tolist() == pytest.approx([-0.1, -0.1])


def test_the_likelihood_of_right_answers_is_added_with_its_weights() -> None:
    batch = replace(tokens([1.0, 2.0], [0.0, 0.0]), likelihood_weights=torch.tensor([0.0, 0.25]))
    terms = compute(batch, of_kind(positive_example_nll_weight=0.5))
    terms.loss.backward()
    assert terms.loss.item() == pytest.approx(-0.25 * math.log(2.0))
    assert batch.logprobs.grad.tolist() == pytest.approx([0.0, -0.25])
