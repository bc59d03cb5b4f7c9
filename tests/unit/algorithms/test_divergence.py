"""The divergences of engine and trainer, as exact expectations under the distribution that was sampled."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.divergence import divergences
from nemo_like.algorithms.losses import kl_to_reference
from nemo_like.algorithms.options import KLType

# The engine samples a token that the trainer has nearly given up.
ENGINE = torch.tensor([0.9, 0.1], dtype=torch.float64)
TRAINER = torch.tensor([0.999, 0.001], dtype=torch.float64)
NAMES = ("gen_kl_error", "policy_kl_error", "js_divergence_error")
weights = st.lists(st.floats(-4, 4), min_size=5, max_size=5)


def kl(p: torch.Tensor, q: torch.Tensor) -> float:
    return float((p * (p / q).log()).sum())


def exact(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    middle = (trainer + engine) / 2
    return {
        "gen_kl_error": kl(engine, trainer),
        "policy_kl_error": kl(trainer, engine),
        "js_divergence_error": (kl(trainer, middle) + kl(engine, middle)) / 2,
    }


def expected(trainer: torch.Tensor, engine: torch.Tensor) -> dict[str, float]:
    """The mean that the figures have over tokens that the engine samples."""
    found = divergences(trainer.log(), engine.log())
    return {name: float((engine * found[name]).sum()) for name in NAMES}


def test_the_mean_over_sampled_tokens_is_each_divergence_itself() -> None:
    assert expected(TRAINER, ENGINE) == pytest.approx(exact(TRAINER, ENGINE), abs=1e-12)
    assert exact(TRAINER, ENGINE) == pytest.approx(
        {"gen_kl_error": 0.3666, "policy_kl_error": 0.0997, "js_divergence_error": 0.0335}, abs=1e-4
    )


def test_k3_of_the_engine_s_tokens_alone_estimates_another_number() -> None:
    """k3 with the ratio the other way round, and the mixture's, without importance weights."""
    back = (ENGINE / TRAINER).log()
    assert float((ENGINE * (back.expm1() - back)).sum()) == pytest.approx(9.44, abs=0.01)
    middle = (TRAINER + ENGINE) / 2
    of_both = [(one / middle).log() for one in (TRAINER, ENGINE)]
    halves = [float((ENGINE * (one.expm1() - one)).sum()) / 2 for one in of_both]
    assert sum(halves) == pytest.approx(0.163, abs=1e-3)


@given(weights, weights)
def test_divergences_of_any_two_distributions_are_unbiased_and_no_token_s_is_negative(
    one: list[float], other: list[float]
) -> None:
    trainer, engine = (torch.tensor(each, dtype=torch.float64).softmax(0) for each in (one, other))
    assert expected(trainer, engine) == pytest.approx(exact(trainer, engine), abs=1e-9)
    found = divergences(trainer.log(), engine.log())
    assert all(float(found[name].min()) >= -1e-15 for name in NAMES)


@pytest.mark.parametrize("gap", [2e-7, 1e-6, 3e-5, 1e-3])
def test_of_log_probs_that_differ_by_rounding_they_have_the_digits_of_a_square(gap: float) -> None:
    generation = torch.full((2,), -1.0)
    trainer = generation + torch.tensor([gap, -gap])
    squares = (trainer.double() - generation.double()).square()
    found = divergences(trainer, generation)
    for name, share in zip(NAMES, (2, 2, 8), strict=True):
        assert found[name].tolist() == pytest.approx((squares / share).tolist(), rel=2 * gap + 1e-6)


@given(st.floats(-(2.0**-6), 2.0**-6, width=32))
def test_k3_of_the_loss_is_not_negative_and_has_its_digits_near_zero(log_ratio: float) -> None:
    estimate = kl_to_reference(torch.tensor([0.0]), torch.tensor([log_ratio]), KLType.k3).item()
    assert estimate >= 0
    # Of e^x - 1 float32 keeps a share of 6e-8.
    assert estimate == pytest.approx(math.expm1(log_ratio) - log_ratio, abs=1e-7 * abs(log_ratio) + 1e-45)
