"""Advantages of tokens by GAE: values by hand, and what they do not depend on."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.generalised_advantages import (
    TokenEstimates,
    generalised_advantages,
    length_adaptive_lambda,
)


@dataclass(frozen=True)
class Sample:
    """``tokens`` are (value, reward, whether the policy generated it)."""

    tokens: list[tuple[float, float, bool]]
    end_value: float = 0.0

    @property
    def responses(self) -> list[tuple[float, float]]:
        return [(value, reward) for value, reward, is_response in self.tokens if is_response]


def estimate(samples: list[Sample], gamma: float, gae_lambda: float | torch.Tensor) -> TokenEstimates:
    tokens = [token for sample in samples for token in sample.tokens]
    return generalised_advantages(
        torch.tensor([value for value, _, _ in tokens]),
        torch.tensor([reward for _, reward, _ in tokens], dtype=torch.float64),
        torch.tensor([is_response for _, _, is_response in tokens], dtype=torch.uint8),
        torch.tensor([len(sample.tokens) for sample in samples], dtype=torch.int64),
        torch.tensor([sample.end_value for sample in samples]),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


def responses_of(samples: list[Sample], packed: torch.Tensor) -> list[list[float]]:
    """By sample, its response tokens alone."""
    parts = packed.split([len(sample.tokens) for sample in samples])
    return [
        [
            value
            for value, (_, _, is_response) in zip(part.tolist(), sample.tokens, strict=True)
            if is_response
        ]
        for part, sample in zip(parts, samples, strict=True)
    ]


# A prompt of two tokens, two response tokens, a token of the environment, the last response token.
TWO_TURNS = Sample(
    [
        (9.0, 9.0, False),
        (8.0, 8.0, False),
        (1.0, 0.0, True),
        (2.0, 0.0, True),
        (7.0, 7.0, False),
        (0.5, 3.0, True),
    ]
)


def test_a_sample_of_two_turns_by_hand() -> None:
    # delta = 3 - 0.5, 0.9 * 0.5 - 2, 0.9 * 2 - 1 from the last token to the first; gamma lambda = 0.45.
    found = estimate([TWO_TURNS], gamma=0.9, gae_lambda=0.5)
    last = 2.5
    middle = -1.55 + 0.45 * last
    first = 0.8 + 0.45 * middle
    assert found.advantages.tolist() == pytest.approx([0, 0, first, middle, 0, last])
    assert found.returns.tolist() == pytest.approx([0, 0, first + 1, middle + 2, 0, last + 0.5])
    assert found.advantages.dtype == found.returns.dtype == torch.float32


def test_a_sample_that_was_cut_off_goes_on_with_the_value_at_its_end() -> None:
    found = estimate([replace(TWO_TURNS, end_value=4.0)], gamma=0.9, gae_lambda=0.5)
    last = 3 + 0.9 * 4 - 0.5
    middle = -1.55 + 0.45 * last
    assert found.advantages[[2, 3, 5]].tolist() == pytest.approx([0.8 + 0.45 * middle, middle, last])


def test_samples_without_response_tokens_get_nothing_and_take_nothing() -> None:
    silent = Sample([(1.0, 1.0, False), (2.0, 2.0, False)], end_value=5.0)
    alone = estimate([TWO_TURNS], 0.9, 0.5)
    both = estimate([silent, TWO_TURNS, silent], 0.9, 0.5)
    assert both.advantages.tolist() == [0, 0, *alone.advantages.tolist(), 0, 0]
    assert both.returns.tolist() == [0, 0, *alone.returns.tolist(), 0, 0]
    nothing = estimate([silent], 0.9, 0.5)
    assert nothing.advantages.tolist() == nothing.returns.tolist() == [0, 0]
    assert estimate([], 0.9, 0.5).advantages.tolist() == []


@pytest.mark.parametrize("where", ["value", "reward", "end value"])
def test_what_is_no_number_spoils_its_own_sample_alone(where: str) -> None:
    value, reward, end = (math.nan if where == name else 1.0 for name in ("value", "reward", "end value"))
    spoilt = Sample([(0.0, 0.0, False), (0.5, 0.0, True), (value, reward, True)], end)
    alone = estimate([TWO_TURNS], 0.9, 0.5)
    found = estimate([spoilt, TWO_TURNS, spoilt], 0.9, 0.5)
    assert found.advantages[:3].isnan().tolist() == [False, True, True]
    assert found.advantages[3:9].tolist() == alone.advantages.tolist()
    assert found.returns[3:9].tolist() == alone.returns.tolist()
    assert found.advantages[9:].isnan().tolist() == [False, True, True]


NUMBERS = st.floats(-10, 10, width=32)
PARTS = st.tuples(NUMBERS, NUMBERS, st.booleans())
SAMPLES = st.lists(
    st.builds(Sample, st.lists(PARTS, min_size=1, max_size=12), NUMBERS), min_size=1, max_size=6
)
SHARES = st.floats(0, 1)


@settings(max_examples=100)
@given(SAMPLES, SHARES, SHARES)
def test_every_sample_of_a_ragged_batch_gets_what_it_gets_alone(
    samples: list[Sample], gamma: float, gae_lambda: float
) -> None:
    together = estimate(samples, gamma, gae_lambda)
    alone = [estimate([sample], gamma, gae_lambda) for sample in samples]
    assert together.advantages.tolist() == torch.cat([one.advantages for one in alone]).tolist()
    assert together.returns.tolist() == torch.cat([one.returns for one in alone]).tolist()


@settings(max_examples=100)
@given(SAMPLES, SHARES, SHARES, st.data())
def test_tokens_that_the_policy_did_not_generate_are_as_if_absent(
    samples: list[Sample], gamma: float, gae_lambda: float, data: st.DataObject
) -> None:
    longer = []
    for sample in samples:
        tokens = list(sample.tokens)
        for place in data.draw(st.lists(st.integers(0, len(tokens)), max_size=4)):
            tokens.insert(place, (math.nan, math.inf, False))
        longer.append(replace(sample, tokens=tokens))
    before, after = (estimate(some, gamma, gae_lambda) for some in (samples, longer))
    for name in ("advantages", "returns"):
        expected, found = getattr(before, name), getattr(after, name)
        assert responses_of(longer, found) == responses_of(samples, expected)
        mask = torch.tensor([is_response for one in longer for *_, is_response in one.tokens])
        assert not found[~mask].any()


@settings(max_examples=100)
@given(SAMPLES, SHARES, SHARES)
def test_a_return_is_the_advantage_and_the_value(
    samples: list[Sample], gamma: float, gae_lambda: float
) -> None:
    found = estimate(samples, gamma, gae_lambda)
    for sample, advantages, returns in zip(
        samples,
        responses_of(samples, found.advantages),
        responses_of(samples, found.returns),
        strict=True,
    ):
        sums = [value + advantage for (value, _), advantage in zip(sample.responses, advantages, strict=True)]
        assert returns == pytest.approx(sums, rel=1e-6, abs=1e-5)


@settings(max_examples=100)
@given(SAMPLES, SHARES)
def test_lambda_0_trusts_the_next_value_alone(samples: list[Sample], gamma: float) -> None:
    found = responses_of(samples, estimate(samples, gamma, 0.0).advantages)
    for sample, advantages in zip(samples, found, strict=True):
        following = [value for value, _ in sample.responses[1:]] + [sample.end_value]
        expected = [
            reward + gamma * then - value
            for (value, reward), then in zip(sample.responses, following, strict=False)
        ]
        assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-5)


@settings(max_examples=100)
@given(SAMPLES)
def test_lambda_1_without_discount_trusts_the_rewards_alone(samples: list[Sample]) -> None:
    found = responses_of(samples, estimate(samples, 1.0, 1.0).advantages)
    for sample, advantages in zip(samples, found, strict=True):
        expected = [
            math.fsum(reward for _, reward in sample.responses[place:]) + sample.end_value - value
            for place, (value, _) in enumerate(sample.responses)
        ]
        assert advantages == pytest.approx(expected, rel=1e-6, abs=1e-5)


def test_each_sample_may_have_a_lambda_of_its_own() -> None:
    samples = [TWO_TURNS, replace(TWO_TURNS, end_value=4.0)]
    together = estimate(samples, 0.9, torch.tensor([0.5, 0.0], dtype=torch.float64))
    apart = [estimate([sample], 0.9, own) for sample, own in zip(samples, (0.5, 0.0), strict=True)]
    assert together.advantages.tolist() == torch.cat([one.advantages for one in apart]).tolist()


def test_the_lambda_of_a_long_sample_is_nearer_to_one() -> None:
    # 1 - 1 / (0.05 x 100) and 1 - 1 / (0.05 x 40); that of 10 tokens would be below 0.
    found = length_adaptive_lambda(torch.tensor([100, 40, 10, 0]), 0.05)
    assert found.tolist() == pytest.approx([0.8, 0.5, 0.0, 0.0])
