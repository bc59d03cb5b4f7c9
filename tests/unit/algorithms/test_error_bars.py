"""Errors that are clustered by problem, by hand and by law."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.error_bars import over_answers, over_problems

VALUES = st.floats(-10, 10, allow_subnormal=False)


def test_the_error_of_a_mean_over_problems_is_their_deviation_over_the_root_of_their_number() -> None:
    estimate = over_problems([0.0, 0.5, 1.0, 0.5])
    assert estimate.value == 0.5
    assert estimate.standard_error == pytest.approx(math.sqrt(0.5 / 3) / 2)
    assert estimate.interval == pytest.approx(
        (0.5 - 1.959964 * 0.204124, 0.5 + 1.959964 * 0.204124), abs=1e-6
    )


def test_answers_to_one_problem_are_a_cluster() -> None:
    """Deviations from 0.6 sum to 0.8 and -0.8: the squares are 1.28, over 25, times 2."""
    estimate = over_answers([[1.0, 1.0], [1.0, 0.0, 0.0], []])
    assert estimate.value == pytest.approx(0.6)
    assert estimate.standard_error == pytest.approx(math.sqrt(1.28 * 2) / 5)


def test_one_problem_has_no_error() -> None:
    assert over_problems([1.0]).interval is None
    assert over_answers([[1.0, 0.0], []]).standard_error is None


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
