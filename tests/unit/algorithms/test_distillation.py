"""Divergences from a teacher: by hand, against the whole vocabulary in float64, and their laws."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_like.algorithms.distillation import (
    forward_kl,
    jensen_shannon,
    reverse_kl,
    sampled_reverse_kl,
)

Divergence = Callable[[Tensor, Tensor], Tensor]

DIVERGENCES: dict[str, Divergence] = {
    "forward": forward_kl,
    "reverse": reverse_kl,
    "Jensen-Shannon": partial(jensen_shannon, beta=0.5),
    "Jensen-Shannon, 0.1": partial(jensen_shannon, beta=0.1),
}
# A teacher, and a student, of four tokens.
TEACHER, STUDENT = (0.5, 0.25, 0.15, 0.1), (0.25, 0.25, 0.1, 0.4)


def logs(*probabilities: float) -> Tensor:
    """[1, k]"""
    return torch.tensor([probabilities], dtype=torch.float64).log()


def dense(name: str, teacher: Tensor, student: Tensor) -> Tensor:
    """The divergence of whole distributions, [M]: the formula, on probabilities [M, vocabulary]."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return torch.where(p > 0, p * (p / q).log(), 0.0).sum(1)

    if name == "forward":
        return kl(teacher, student)
    if name == "reverse":
        return kl(student, teacher)
    beta = 0.1 if name.endswith("0.1") else 0.5
    mixture = beta * teacher + (1 - beta) * student
    return beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture)


def distributions(seed: int, vocabulary: int, spread: float) -> tuple[Tensor, Tensor]:
    """Log-probs of teacher and student, [6, vocabulary] float64, the teacher's likeliest token first."""
    generator = torch.Generator().manual_seed(seed)
    teacher, student = (
        spread * torch.randn(2, 6, vocabulary, dtype=torch.float64, generator=generator)
    ).log_softmax(-1)
    order = teacher.argsort(dim=1, descending=True)
    return teacher.gather(1, order), student.gather(1, order)


def test_two_tokens_and_the_tail_by_hand() -> None:
    # The teacher leaves 1/4 to the tail, the student 1/2.
    teacher, student = logs(0.5, 0.25), logs(0.25, 0.25)
    assert forward_kl(teacher, student).item() == pytest.approx(
        0.5 * math.log(2) + 0 + 0.25 * math.log(1 / 2)
    )
    assert reverse_kl(teacher, student).item() == pytest.approx(
        0.25 * math.log(1 / 2) + 0 + 0.5 * math.log(2)
    )
    # The mixture is 3/8, 1/4, 3/8.
    of_teacher = 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)
    of_student = 0.25 * math.log(2 / 3) + 0.5 * math.log(4 / 3)
    assert jensen_shannon(teacher, student, 0.5).item() == pytest.approx((of_teacher + of_student) / 2)


def test_a_student_that_agrees_on_the_ratios_but_talks_elsewhere_is_far_away() -> None:
    """Renormalised over the two tokens both would be the same."""
    assert forward_kl(logs(0.6, 0.3), logs(0.02, 0.01)).item() > 2


@pytest.mark.parametrize("name", DIVERGENCES)
def test_with_k_the_vocabulary_they_are_the_divergences_and_so_are_their_gradients(name: str) -> None:
    teacher, student = distributions(seed=1, vocabulary=9, spread=1.5)
    logits, other_logits = student.clone().requires_grad_(), student.clone().requires_grad_()
    ours = DIVERGENCES[name](teacher, logits.log_softmax(-1))
    plain = dense(name, teacher.exp(), other_logits.softmax(-1))
    torch.testing.assert_close(ours, plain, rtol=1e-10, atol=1e-12)
    slope = torch.linspace(-1, 2, 6, dtype=torch.float64)
    ours.backward(slope)
    plain.backward(slope)
    torch.testing.assert_close(logits.grad, other_logits.grad, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_with_a_tail_agree_with_finite_differences(name: str) -> None:
    teacher, student = distributions(seed=2, vocabulary=9, spread=1.0)

    def of_logits(logits: Tensor) -> Tensor:
        return DIVERGENCES[name](teacher[:, :4], logits.log_softmax(-1)[:, :4])

    assert torch.autograd.gradcheck(of_logits, student.clone().requires_grad_())


@pytest.mark.parametrize("name", DIVERGENCES)
@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**16), vocabulary=st.integers(2, 12), k=st.integers(1, 12), spread=st.floats(0, 4)
)
def test_they_are_at_least_0_and_grow_with_k_to_the_divergence_of_the_whole_vocabulary(
    name: str, seed: int, vocabulary: int, k: int, spread: float
) -> None:
    teacher, student = distributions(seed, vocabulary, spread)
    k = min(k, vocabulary)
    value = DIVERGENCES[name](teacher[:, :k], student[:, :k])
    less = DIVERGENCES[name](teacher[:, : max(1, k - 1)], student[:, : max(1, k - 1)])
    tolerance = 1e-6  # a tail of 1e-9 is known to as many digits
    assert bool((value >= -tolerance).all())
    assert bool((value >= less - tolerance).all())
    assert bool((value <= dense(name, teacher.exp(), student.exp()) + tolerance).all())
    assert bool((DIVERGENCES[name](teacher[:, :k], teacher[:, :k]).abs() <= tolerance).all())


@pytest.mark.parametrize("name", DIVERGENCES)
def test_they_are_0_only_where_tokens_and_tail_agree(name: str) -> None:
    for student in (logs(0.5, 0.2), logs(0.4, 0.3), logs(0.4, 0.2)):
        assert DIVERGENCES[name](logs(0.5, 0.3), student).item() > 1e-3


@settings(max_examples=40)
@given(seed=st.integers(0, 2**16), spread=st.floats(0, 60))
def test_jensen_shannon_is_symmetric_at_a_half_and_bounded(seed: int, spread: float) -> None:
    teacher, student = (one[:, :5] for one in distributions(seed, vocabulary=8, spread=spread))
    value = jensen_shannon(teacher, student, 0.5)
    torch.testing.assert_close(value, jensen_shannon(student, teacher, 0.5))
    assert bool((value <= math.log(2) + 1e-12).all())
    for beta in (0.1, 0.7):
        entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
        assert bool((jensen_shannon(teacher, student, beta) <= entropy + 1e-12).all())


def test_jensen_shannon_goes_to_both_kls_at_its_ends() -> None:
    teacher, student = logs(*TEACHER), logs(*STUDENT)
    beta = 1e-6
    near_0 = jensen_shannon(teacher, student, beta).item() / beta
    near_1 = jensen_shannon(teacher, student, 1 - beta).item() / beta
    assert near_0 == pytest.approx(forward_kl(teacher, student).item(), rel=1e-4)
    assert near_1 == pytest.approx(reverse_kl(teacher, student).item(), rel=1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ((-0.7, -0.8), (-900.0, 0.0)),  # the student is sure of one token
        ((-1e-8, -20.0), (-60.0, -50.0)),  # the teacher leaves nothing to the tail, the student nearly all
        ((0.0, -200.0), (-0.7, -0.7)),
        ((-0.7, -0.8), (-1e30, -0.1)),  # a token that the student must not sample
        ((0.0, 0.0), (-0.1, -0.1)),  # columns of a token that does not train hold zeros
    ],
)
def test_values_and_gradients_are_finite_in_float32(
    name: str, teacher: tuple[float, ...], student: tuple[float, ...]
) -> None:
    ours = torch.tensor([student], requires_grad=True)
    value = DIVERGENCES[name](torch.tensor([teacher]), ours)
    value.backward()
    assert bool(value.isfinite().all())
    assert bool(ours.grad.isfinite().all())


def test_the_sampled_estimate_is_a_limited_difference() -> None:
    estimate = sampled_reverse_kl(torch.tensor([-1.0, -3.0, -90.0]), torch.tensor([-2.0, -1.0, -1.0]))
    assert estimate.tolist() == [-1.0, 2.0, 20.0]


def test_its_mean_over_the_students_tokens_is_the_reverse_kl_and_its_policy_gradient_the_gradient() -> None:
    """Both are sums over all four tokens, each with the student's probability."""
    teacher = logs(*TEACHER)
    logits = logs(*STUDENT).requires_grad_()
    logprobs = logits.log_softmax(-1)
    exact = reverse_kl(teacher, logprobs).sum()
    estimate = sampled_reverse_kl(teacher, logprobs.detach())
    assert (logprobs.exp() * estimate).sum().item() == pytest.approx(exact.item())
    (by_samples,) = torch.autograd.grad(
        (logprobs.detach().exp() * estimate * logprobs).sum(), logits, retain_graph=True
    )
    (by_formula,) = torch.autograd.grad(exact, logits)
    torch.testing.assert_close(by_samples, by_formula)
