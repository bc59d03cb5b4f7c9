"""Where the KL's clamps hold, and where descent on it ends: two tokens, gradients taken exactly."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.losses import kl_to_reference
from nemo_like.algorithms.options import KLType

# The estimate is beyond 10 from these log-ratios on: 10 itself, sqrt(20), and the root of e^x - 1 - x = 10.
CLAMPED_FROM = {KLType.k1: 10.0, KLType.k2: math.sqrt(20), KLType.k3: 2.6107}

_NUM_STEPS = 300


def gradient(kind: KLType, log_ratio: float) -> float:
    """Of one token's estimate with respect to its log-prob, at reference - policy = ``log_ratio``."""
    logprobs = torch.tensor([-25.0], requires_grad=True)
    kl_to_reference(logprobs, logprobs.detach() + log_ratio, kind).sum().backward()
    return logprobs.grad.item()


@pytest.mark.parametrize(
    ("kind", "log_ratio", "expected"),
    [
        # The path's part and, from the factor, the estimate: 1 - x, -x + x^2 / 2, (1 - e^x) + (e^x - 1 - x).
        (KLType.k1, 3.0, -2.0),
        (KLType.k1, -9.0, 10.0),
        (KLType.k2, 3.0, 1.5),
        (KLType.k2, -4.0, 12.0),
        (KLType.k3, 2.0, -2.0),
        (KLType.k3, 2.6, -2.6),
        (KLType.k3, -9.0, 9.0),
    ],
)
def test_inside_the_clamp_path_and_score_function_both_count(
    kind: KLType, log_ratio: float, expected: float
) -> None:
    assert gradient(kind, log_ratio) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("kind", "log_ratio"),
    [(kind, start + more) for kind, start in CLAMPED_FROM.items() for more in (0.01, 2.0, 12.0, 60.0)]
    + [(KLType.k1, -10.01), (KLType.k2, -4.5), (KLType.k3, -11.01), (KLType.k3, -25.0)],
)
def test_where_a_clamp_holds_nothing_flows(kind: KLType, log_ratio: float) -> None:
    assert gradient(kind, log_ratio) == 0.0


def descend(kind: KLType, start: float, reference: float) -> float:
    """The first token's probability where descent on the KL alone ends, from ``start``.

    The expectation over both tokens is exact: each one's gradient counts as often as it is sampled.
    """
    log_odds = torch.tensor(math.log(start) - math.log1p(-start), dtype=torch.float64, requires_grad=True)
    references = torch.tensor([reference, 1 - reference], dtype=torch.float64).log()
    optimizer = torch.optim.Adam([log_odds], lr=0.2)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.001, total_iters=_NUM_STEPS)
    for _ in range(_NUM_STEPS):
        logprobs: Tensor = torch.nn.functional.logsigmoid(torch.stack((log_odds, -log_odds)))
        loss = (logprobs.detach().exp() * kl_to_reference(logprobs, references, kind)).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return torch.sigmoid(log_odds).item()


@pytest.mark.parametrize("reference", [0.5, 0.9])
@pytest.mark.parametrize("start", [1e-6, 1e-3, 0.01, 0.2, 0.99, 1 - 1e-6])
@pytest.mark.parametrize("kind", [KLType.k1, KLType.k3])
def test_descent_on_the_kl_alone_ends_at_the_reference(kind: KLType, start: float, reference: float) -> None:
    # The rarer token is clamped for k1 below e^-10 of its reference, for k3 below e^-2.6 of it. The
    # other one, which nearly every sample has, then carries the gradient.
    assert descend(kind, start, reference) == pytest.approx(reference, abs=1e-3)


@pytest.mark.parametrize("start", [0.05, 0.2, 0.8, 0.95])
def test_descent_on_k2_ends_at_the_reference_from_near_it(start: float) -> None:
    assert descend(KLType.k2, start, 0.5) == pytest.approx(0.5, abs=1e-3)


@pytest.mark.parametrize("start", [1e-4, 0.01, 0.02])
def test_descent_on_k2_stays_at_the_clamp_from_far_away(start: float) -> None:
    # The mean of x^2 / 2 is no KL: giving a token up lowers it too, which the clamp ends at sqrt(20) nats.
    assert descend(KLType.k2, start, 0.5) == pytest.approx(0.5 * math.exp(-math.sqrt(20)), rel=0.05)


@pytest.mark.parametrize("kind", list(KLType))
def test_policy_and_reference_that_find_each_others_tokens_impossible_stay(kind: KLType) -> None:
    # 13.8 nats apart on either token: both clamps hold.
    assert descend(kind, 1e-6, 1 - 1e-6) == pytest.approx(1e-6)
