from __future__ import annotations

from nemo_like.tripwires.measured import is_due
from nemo_like.tripwires.options import Tripwires


def test_cheap_looks_at_the_first_three_and_at_every_tenth() -> None:
    assert [number for number in range(1, 31) if is_due(number, Tripwires.cheap)] == [1, 2, 3, 10, 20, 30]


def test_all_looks_always_and_off_never() -> None:
    assert all(is_due(number, Tripwires.all) for number in range(1, 31))
    assert not any(is_due(number, Tripwires.off) for number in range(1, 31))
