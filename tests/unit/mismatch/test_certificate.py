from __future__ import annotations

import math

import pytest

from nemo_like.mismatch.certificate import Certificate, Comparison
from nemo_like.mismatch.search import NOTHING


def comparison(mean_gap: float) -> Comparison:
    return Comparison(
        weights="as loaded", what="engine", num_tokens=4, mean_gap=mean_gap, largest_gap=mean_gap, limit=0.1
    )


@pytest.mark.parametrize(("gap", "agrees"), [(0.1, True), (0.11, False), (math.nan, False)])
def test_a_gap_up_to_the_limit_is_rounding_and_nan_is_none(gap: float, agrees: bool) -> None:
    assert comparison(gap).agrees is agrees
    assert Certificate(comparisons=[comparison(gap)], moved=None, limit=0.1).holds is agrees


def test_a_reload_that_changed_no_log_prob_certifies_nothing() -> None:
    still = Certificate(comparisons=[comparison(0.0)], moved=0.05, limit=0.1)
    assert (still.was_reload_tested, still.holds) == (False, False)
    moved = Certificate(comparisons=[comparison(0.0)], moved=0.3, limit=0.1)
    assert moved.holds and moved.sentence == NOTHING
    assert moved.as_json()["comparisons"] == [
        {
            "weights": "as loaded",
            "what": "engine",
            "num_tokens": 4,
            "mean_gap": 0.0,
            "largest_gap": 0.0,
            "limit": 0.1,
            "agrees": True,
        }
    ]
    assert "was not tested" in still.sentence
