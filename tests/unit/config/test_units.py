from __future__ import annotations

import pytest

from nemo_like.config.units import parse_duration_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("00:00:00:00", 0), ("00:03:50:00", 13_800), ("1:02:03:04", 93_784), ("10:00:00:01", 864_001)],
)
def test_days_hours_minutes_and_seconds_add_up(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "3600", "01:00:00", "00:24:00:00", "00:00:60:00", "00:00:00:60", "a:b:c:d"]
)
def test_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="DD:HH:MM:SS"):
        parse_duration_s(text)
