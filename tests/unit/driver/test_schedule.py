from __future__ import annotations

from types import SimpleNamespace

import pytest

from nemo_like.driver.schedule import validates_after


@pytest.mark.parametrize(
    ("period", "at_start", "at_end", "expected"),
    [
        (0, False, False, []),
        (0, True, True, [0, 7]),
        (3, False, False, [3, 6]),
        (3, True, True, [0, 3, 6, 7]),
        (7, False, True, [7]),
    ],
)
def test_validation_falls_on_the_period_the_start_and_the_end(period, at_start, at_end, expected) -> None:
    grpo = SimpleNamespace(val_period=period, val_at_start=at_start, val_at_end=at_end, max_num_steps=7)
    assert [step for step in range(8) if validates_after(step, grpo)] == expected
