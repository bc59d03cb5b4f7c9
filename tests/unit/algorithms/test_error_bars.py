"""Errors that are clustered by problem, by hand and by law."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.error_bars import Estimate, over_answers, over_problems, student_quantile

VALUES = st.floats(-10, 10, allow_subnormal=False)


def test_the_error_of_a_mean_over_problems_is_their_deviation_over_the_root_of_their_number() -> None:
    estimate = over_problems([0.0, 0.5, 1.0, 0.5])
    assert estimate.value == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt(0.5 / 3) / 2)
    # Student's distribution with 3 degrees of freedom has 95 % within 3.182446.
    assert estimate.interval == pytest.approx(
        (0.5 - 3.182446 * 0.204124, 0.5 + 3.182446 * 0.204124), abs=1e-6
    )


def test_answers_to_one_problem_are_a_cluster() -> None:
    """Deviations from 0.6 sum to 0.8 and -0.8: the squares are 1.28, over 25, times 2."""
    estimate = over_answers([[1.0, 1.0], [1.0, 0.0, 0.0], []])
    assert estimate.value == pytest.approx(0.6)
    assert estimate.standard_error == pytest.approx(math.sqrt(1.28 * 2) / 5)


def test_one_problem_has_no_error() -> None:
    assert over_problems([1.0]).interval is None
    assert over_answers([[1.0, 0.0], []]).standard_error is None


def test_the_quantiles_are_those_of_the_tables() -> None:
    tabulated = {1: 12.7062, 2: 4.30265, 3: 3.18245, 4: 2.77645, 9: 2.26216, 29: 2.04523, 100: 1.98397}
    assert {degrees: student_quantile(degrees) for degrees in tabulated} == pytest.approx(tabulated, rel=1e-5)


def test_the_interval_of_a_share_is_wilsons_for_as_many_answers_as_the_error_tells() -> None:
    # 3 of 12 problems, one answer each: t = 2.200985, and by hand (0.25 + t^2 / 24 -+ ...) / (1 + t^2 / 12).
    estimate = over_problems([1.0] * 3 + [0.0] * 9).as_share()
    square = 2.200985**2 / 12
    half = math.sqrt(0.25 * 0.75 * square + square**2 / 4)
    expected = ((0.25 + square / 2 - half) / (1 + square), (0.25 + square / 2 + half) / (1 + square))
    assert estimate.interval == pytest.approx(expected, abs=1e-6)
    # Four equal answers to each problem say no more than one.
    repeated = over_answers([[1.0] * 4] * 3 + [[0.0] * 4] * 9).as_share()
    assert repeated.interval == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(("solved", "expected"), [(0.0, (0.0, 0.12237)), (1.0, (0.87763, 1.0))])
def test_where_all_answers_agree_the_interval_is_not_empty(
    solved: float, expected: tuple[float, float]
) -> None:
    # 30 problems, t^2 / (30 + t^2) with t = 2.04523, whether each was answered once or eight times.
    for answers in (1, 8):
        estimate = over_answers([[solved] * answers] * 30).as_share()
        assert estimate.interval == pytest.approx(expected, abs=1e-5)


def binomial(count: int, size: int, share: float) -> float:
    return math.comb(size, count) * share**count * (1 - share) ** (size - count)


def share_of(solved: int, size: int) -> Estimate:
    """What is estimated from ``size`` problems, one answer each."""
    return over_problems([1.0] * solved + [0.0] * (size - solved)).as_share()


def coverage(intervals: list[tuple[float, float] | None], share: float) -> float:
    """The exact probability that the interval by the number of solved problems has ``share``."""
    found = 0.0
    for solved, ends in enumerate(intervals):
        assert ends is not None
        found += binomial(solved, len(intervals) - 1, share) * (ends[0] <= share <= ends[1])
    return found


def test_the_interval_of_a_share_covers_it_at_few_problems_and_hard_ones() -> None:
    shares = [number / 200 for number in range(4, 101)]  # 0.02 to 0.5
    for size, least, mean in ((10, 0.922, 0.975), (30, 0.924, 0.96), (100, 0.935, 0.95)):
        intervals = [share_of(solved, size).interval for solved in range(size + 1)]
        covered = [coverage(intervals, share) for share in shares]
        assert min(covered) >= least, dict(zip(shares, covered, strict=True))
        assert fmean(covered) == pytest.approx(mean, abs=0.005)
    # An interval around the mean misses every fifth share of 0.05: it is empty where none of 30 is solved.
    plain = [replace(share_of(solved, 30), is_share=False).interval for solved in range(31)]
    assert coverage(plain, 0.05) < 0.8


def test_it_covers_shares_of_problems_with_several_answers_of_which_few_are_solved() -> None:
    """Beta-distributed difficulties with a mean of 0.1, four answers to each of 30 problems."""
    draws, covered, tries = random.Random(5), 0, 500
    for _ in range(tries):
        chances = [draws.betavariate(0.5, 4.5) for _ in range(30)]
        answers = [[float(draws.random() < chance) for _ in range(4)] for chance in chances]
        low, high = over_answers(answers).as_share().interval or (0.0, 0.0)
        covered += low <= 0.1 <= high
    assert 0.92 < covered / tries < 0.98


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=2)))
def test_with_equally_many_answers_the_problems_means_have_the_same_error(
    problems: list[list[float]],
) -> None:
    by_answers, by_means = over_answers(problems), over_problems([fmean(one) for one in problems])
    assert by_answers.value == pytest.approx(by_means.value, abs=1e-9)
    assert by_answers.standard_error == pytest.approx(by_means.standard_error, abs=1e-9)


@given(st.lists(VALUES, min_size=2))
def test_with_one_answer_each_the_error_is_that_of_independent_ones(values: list[float]) -> None:
    expected = stdev(values) / math.sqrt(len(values))
    assert over_answers([[value] for value in values]).standard_error == pytest.approx(expected, abs=1e-9)


@given(st.lists(st.lists(VALUES, min_size=1, max_size=4), min_size=2, max_size=6))
def test_repeating_every_answer_makes_nothing_surer(problems: list[list[float]]) -> None:
    twice = over_answers([one + one for one in problems])
    assert twice.standard_error == pytest.approx(over_answers(problems).standard_error, abs=1e-9)


def test_a_share_that_rounds_to_all_of_it_has_an_interval() -> None:
    """The standard error is above 0 then, and what independent answers would have is 0."""
    values = [1.0 - 2**-53, *[1.0] * 99]
    estimate = over_problems(values, num_answers=6400).as_share()
    assert (estimate.value, estimate.standard_error > 0) == (1.0, True)
    low, high = estimate.interval
    assert 0.9 < low < high == 1.0
