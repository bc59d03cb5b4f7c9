"""The loss's value and derivatives: worked by hand, and the same as autograd's of training's own loss."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from nemo_like.algorithms.losses import GlobalCounts, LossTokens, kl_to_reference, token_weights
from nemo_like.algorithms.losses import kl_to_go as own_kl_to_go
from nemo_like.algorithms.options import ImportanceSamplingType, KLType, LossConfig
from nemo_like.tripwires.reference_loss import ReferenceTerms, ScoredTokens, kl_to_go, reference_terms
from tests.losses import compute
from tests.unit.algorithms.loss_cases import CONFIG, of_kind


def scored(ratios: list[float], advantages: list[float], **changes: Any) -> ScoredTokens:
    """Tokens of one sample each, of an update with 4 tokens and 2 samples; log-probs are of these ratios."""
    count = len(ratios)
    fields: dict[str, Any] = {
        "logprobs": torch.tensor(ratios, dtype=torch.float64).log(),
        "prev": torch.zeros(count, dtype=torch.float64),
        "advantages": torch.tensor(advantages, dtype=torch.float64),
        "advantage_sizes": torch.tensor(advantages, dtype=torch.float64).abs(),
        "trains": torch.ones(count, dtype=torch.bool),
        "sample": torch.arange(count),
        "num_samples": count,
        "update_tokens": torch.full((count,), 4.0, dtype=torch.float64),
        "update_samples": torch.full((count,), 2.0, dtype=torch.float64),
    }
    return ScoredTokens(**(fields | changes))


def test_beyond_its_bound_a_token_has_no_gradient() -> None:
    # Bounds 0.8 and 1.28; each token's share is 1/4.
    terms = reference_terms(scored([1.1, 1.5, 1.5, 0.5], [2.0, 2.0, -2.0, -2.0]), CONFIG)
    assert terms.gradient.tolist() == pytest.approx([-2 * 1.1 / 4, 0, 2 * 1.5 / 4, 0])
    assert terms.loss.tolist() == pytest.approx([-2.2 / 4, -2.56 / 4, 3 / 4, 1.6 / 4])
    assert terms.is_certain.all()


def test_next_to_a_bound_nothing_is_certain() -> None:
    terms = reference_terms(scored([1.28001, 1.279, 0.79999], [1.0, 1.0, 1.0]), CONFIG)
    assert terms.is_certain.tolist() == [False, True, False]


def test_the_dual_clip_holds_negative_advantages_alone() -> None:
    terms = reference_terms(scored([4.0, 4.0], [-1.0, 1.0]), of_kind("policy_gradient", ratio_clip_c=3.0))
    assert terms.gradient.tolist() == [0.0, 0.0]
    assert terms.loss.tolist() == pytest.approx([3 / 4, -1.28 / 4])


def test_a_token_that_does_not_train_has_no_gradient_whatever_its_columns_hold() -> None:
    tokens = scored(
        [1.0, 1.0],
        [1.0, 1.0],
        trains=torch.tensor([True, False]),
        prev=torch.tensor([0.0, math.nan], dtype=torch.float64),
    )
    terms = reference_terms(tokens, CONFIG)
    assert terms.gradient.tolist() == pytest.approx([-0.25, 0.0])
    assert terms.loss.tolist() == pytest.approx([-0.25, 0.0])


def test_the_kl_adds_its_path_and_score_gradient() -> None:
    # x = 0.5: k3 = e^0.5 - 1.5; its derivative by the log-prob is 1 - e^0.5, and the score's part is k3.
    cfg = replace(CONFIG, reference_policy_kl_penalty=0.1)
    tokens = scored([1.0], [0.0], reference=torch.tensor([0.5], dtype=torch.float64))
    terms = reference_terms(tokens, cfg)
    assert terms.gradient.item() == pytest.approx(0.1 / 4 * (math.exp(0.5) - 1.5 + 1 - math.exp(0.5)))
    assert terms.loss.item() == pytest.approx(0.1 / 4 * (math.exp(0.5) - 1.5))


def test_the_kl_to_go_sums_a_sample_from_a_token_to_its_end() -> None:
    ratios = torch.tensor([-1.0, -2.0, -3.0, -5.0], dtype=torch.float64)
    sample = torch.tensor([1, 1, 0, 0])
    assert kl_to_go(ratios, sample, 2, KLType.k1).tolist() == [3.0, 2.0, 8.0, 5.0]


@pytest.mark.parametrize("kind", KLType)
def test_the_kl_to_go_is_that_of_training(kind: KLType) -> None:
    torch.manual_seed(0)
    prev, reference = -torch.rand(7), -torch.rand(7)
    expected = own_kl_to_go(kl_to_reference(prev, reference, kind), torch.tensor([3, 4]))
    sample = torch.tensor([0, 0, 0, 1, 1, 1, 1])
    found = kl_to_go((reference - prev).double(), sample, 2, kind)
    assert found.tolist() == pytest.approx(expected.tolist(), abs=1e-6)


LOSSES: dict[str, dict[str, Any]] = {
    "ppo": {},
    "dual clip": {"ratio_clip_c": 1.5},
    "cispo": {"kind": "cispo"},
    "reinforce": {"kind": "reinforce"},
    "gspo": {"kind": "gspo", "token_level_loss": False},
    "sequence level": {"token_level_loss": False},
    "dr grpo": {"token_level_loss": False, "sequence_length_normalizer": 50},
    "k1": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": KLType.k1},
    "sapo": {"kind": "sapo"},
    "sapo with tau": {"kind": "sapo", "tau_pos": 0.7, "tau_neg": 2.5, "token_level_loss": False},
    "gspo_token": {"kind": "gspo_token", "token_level_loss": False, "ratio_clip_c": 3.0},
    "k2": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": KLType.k2},
    "k3": {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": KLType.k3},
    "entropy": {"entropy_coef": 0.01},
    "correction": {"use_importance_sampling_correction": True},
    "tis": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": ImportanceSamplingType.tis,
        "truncated_importance_sampling_ratio": 1.5,
    },
    "icepop": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": ImportanceSamplingType.icepop,
        "truncated_importance_sampling_ratio": 1.5,
        "truncated_importance_sampling_ratio_min": 0.7,
    },
    "seq_mask": {
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": ImportanceSamplingType.seq_mask,
        "truncated_importance_sampling_ratio": 1.1,
        "truncated_importance_sampling_ratio_min": 0.9,
    },
    "off-policy mask": {"off_policy_mask_threshold": 0.05},
    "gspo with the off-policy mask": {
        "kind": "gspo",
        "token_level_loss": False,
        "off_policy_mask_threshold": 0.05,
    },
    "weighed k3": {"reference_policy_kl_penalty": 0.1, "use_on_policy_kl_approximation": True},
    "highest entropies": {"top_entropy_quantile": 0.3},
    "moving entropy": {"entropy_coef": 0.0, "entropy_target": 0.3},
    "likelihood": {"positive_example_nll_weight": 0.1},
    "gspo with correction": {
        "kind": "gspo",
        "token_level_loss": False,
        "use_importance_sampling_correction": True,
        "truncated_importance_sampling_type": ImportanceSamplingType.tis,
        "truncated_importance_sampling_ratio": 2.0,
    },
}


def both(cfg: LossConfig) -> tuple[ReferenceTerms, float, torch.Tensor, torch.Tensor]:
    """The reference of 40 samples with random log-probs, far ones among them; and loss and gradients of
    training's own function, by log-prob and by entropy."""
    torch.manual_seed(1)
    lengths = torch.randint(1, 9, (40,))
    sample = torch.repeat_interleave(torch.arange(40), lengths)
    count = len(sample)

    def near(values: torch.Tensor) -> torch.Tensor:
        return values + torch.randn(count) * torch.where(torch.rand(count) < 0.05, 12.0, 0.3)

    logprobs = (-2 * torch.rand(count)).requires_grad_()
    prev, generation, reference = (near(logprobs.detach()) for _ in range(3))
    entropy = torch.rand(count).requires_grad_()
    mask = (torch.rand(40) > 0.2).float()
    # Per token, as with a KL in the reward: GSPO and GSPO-token differ there.
    advantages = torch.randn(40)[sample] + 0.1 * torch.randn(count)
    counts = GlobalCounts(num_tokens=count + 20, num_samples=44)
    has_kl = cfg.reference_policy_kl_penalty != 0
    gate = (torch.rand(count) < 0.3).float() if cfg.top_entropy_quantile < 1 else None
    likelihood = None
    if cfg.positive_example_nll_weight:
        likelihood = mask[sample] * (sample % 3 == 0) * cfg.positive_example_nll_weight / count
    terms = compute(
        LossTokens(
            logprobs=logprobs,
            prev_logprobs=prev,
            advantages=advantages,
            weights=token_weights(sample, mask, lengths.float(), counts, cfg),
            mask=mask[sample],
            sample_index=sample,
            response_lengths=lengths.float(),
            reference_logprobs=reference if has_kl else None,
            generation_logprobs=generation,
            entropy=entropy if cfg.entropy_coef is not None else None,
            entropy_gate=gate,
            likelihood_weights=likelihood,
            entropy_coefs=None if cfg.entropy_target is None else torch.full((count,), 0.02),
        ),
        cfg,
    )
    (terms.loss + 0.0 * entropy.sum()).backward()
    assert logprobs.grad is not None and entropy.grad is not None
    expected = reference_terms(
        ScoredTokens(
            logprobs=logprobs.detach().double(),
            prev=prev.double(),
            advantages=advantages.double(),
            advantage_sizes=advantages.double().abs(),
            trains=mask[sample] > 0,
            sample=sample,
            num_samples=40,
            update_tokens=torch.full((count,), float(counts.num_tokens), dtype=torch.float64),
            update_samples=torch.full((count,), float(counts.num_samples), dtype=torch.float64),
            generation=generation.double(),
            reference=reference.double() if has_kl else None,
            entropy=entropy.detach().double() if cfg.entropy_coef is not None else None,
            gate=None if gate is None else gate.double(),
            entropy_coefs=None
            if cfg.entropy_target is None
            else torch.full((count,), 0.02, dtype=torch.float64),
            likelihood=None if likelihood is None else likelihood.double(),
        ),
        cfg,
    )
    return expected, terms.loss.item(), logprobs.grad.double(), entropy.grad.double()


@pytest.mark.parametrize("changes", LOSSES.values(), ids=LOSSES)
def test_it_is_autograds_of_trainings_own_loss(changes: dict[str, Any]) -> None:
    expected, loss, by_logprob, by_entropy = both(of_kind(**changes))
    errors = (by_logprob - expected.gradient).abs() / expected.scale
    assert expected.is_certain.float().mean() > 0.9
    assert errors[expected.is_certain].max() < 1e-5
    assert expected.loss.sum().item() == pytest.approx(loss, rel=1e-5)
    assert by_entropy.tolist() == pytest.approx(expected.entropy_gradient.tolist(), rel=1e-5)


MISTAKES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "the KL's sign": ({"reference_policy_kl_penalty": 0.1}, {"reference_policy_kl_penalty": -0.1}),
    "the upper bound": ({"ratio_clip_max": 0.5}, {"ratio_clip_max": 0.2}),
    "no dual clip": ({"ratio_clip_c": 1.5}, {}),
    "another temperature": ({"kind": "sapo", "tau_neg": 2.0}, {"kind": "sapo"}),
    "GSPO's gradient": (
        {"kind": "gspo_token", "token_level_loss": False},
        {"kind": "gspo", "token_level_loss": False},
    ),
    "another mean": ({}, {"token_level_loss": False}),
    "another estimator": (
        {"reference_policy_kl_penalty": 0.1},
        {"reference_policy_kl_penalty": 0.1, "reference_policy_kl_type": KLType.k2},
    ),
}


@pytest.mark.parametrize(("configured", "computed"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_far_above_rounding(configured: dict[str, Any], computed: dict[str, Any]) -> None:
    expected, _, _, _ = both(of_kind(**configured))
    _, _, by_logprob, _ = both(of_kind(**computed))
    errors = (by_logprob - expected.gradient).abs() / expected.scale
    assert errors[expected.is_certain].max() > 1e-2
