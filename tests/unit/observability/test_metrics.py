from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.observability.metrics import maximum, mean, merge, minimum, summed


def test_means_are_weighted_when_merged():
    # 3 samples with mean 2 and 1 sample with mean 10: (6 + 10) / 4.
    merged = merge([{"reward": mean(6.0, 3)}, {"reward": mean(10.0, 1)}])
    assert merged["reward"].value == 4.0


def test_sums_minima_and_maxima_merge_by_their_own_rule():
    merged = merge(
        [
            {"tokens": summed(5), "low": minimum(2.0), "high": maximum(2.0)},
            {"tokens": summed(7), "low": minimum(-1.0), "high": maximum(9.0)},
        ]
    )
    assert {name: metric.value for name, metric in merged.items()} == {
        "tokens": 12.0,
        "low": -1.0,
        "high": 9.0,
    }


def test_a_mean_over_nothing_is_zero():
    assert mean(0.0, 0.0).value == 0.0


def test_a_metric_that_only_one_part_has_is_kept():
    assert merge([{"a": summed(1)}, {"b": summed(2)}])["b"].value == 2.0


def test_two_reductions_under_one_name_are_an_error_with_both():
    with pytest.raises(ValueError, match=r"'reward' is recorded as (mean|sum) and (as )?(mean|sum)"):
        merge([{"reward": mean(1.0)}, {"reward": summed(1.0)}])


@given(st.lists(st.tuples(st.integers(-100, 100), st.integers(1, 9)), min_size=1), st.integers(0, 20))
def test_how_the_parts_are_grouped_does_not_matter(samples, cut):
    parts = [{"x": mean(total, weight), "y": maximum(total), "z": summed(total)} for total, weight in samples]
    halves = [merge(part) for part in (parts[:cut], parts[cut:])]
    assert {k: v.value for k, v in merge(halves).items()} == {k: v.value for k, v in merge(parts).items()}
