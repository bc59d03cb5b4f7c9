"""Reference answers as texts, worked by hand."""

from __future__ import annotations

import math
from datetime import date
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.answers import answer_text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        ("3.0", "3.0"),  # text stays as it is
        (" a ", " a "),
        (3, "3"),
        (3.0, "3"),
        (-0.0, "0"),
        (100.0, "100"),
        (1e21, "1000000000000000000000"),
        (0.1, "0.1"),
        (1e-05, "0.00001"),
        (2.5e-7, "0.00000025"),
        (-12.50, "-12.5"),
        (True, "True"),
        (False, "False"),
        (Decimal("3.00"), "3"),
        (Decimal("1E-5"), "0.00001"),
        (np.float64(0.25), "0.25"),
        (np.int64(7), "7"),
        (date(2024, 2, 1), "2024-02-01"),
    ],
)
def test_an_answer_is_what_a_model_would_write(value: Any, text: str) -> None:
    assert answer_text(value, "f.jsonl:1") == text


@pytest.mark.parametrize(
    "value", [["4"], {"x": 4}, ("4",), {4}, b"4", object()], ids=lambda value: str(type(value))
)
def test_what_is_no_text_is_refused_with_the_place_and_a_remedy(value: Any) -> None:
    with pytest.raises(
        ValueError, match=r"f\.jsonl:7: the answer is .*write it as text; .*keep it in another field"
    ):
        answer_text(value, "f.jsonl:7")


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, Decimal("NaN")])
def test_a_number_that_is_not_finite_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"f\.jsonl:7: the answer is .*no response can be"):
        answer_text(value, "f.jsonl:7")


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_the_text_of_a_number_is_that_number_in_plain_digits(value: float) -> None:
    text = answer_text(value, "here")
    assert float(text) == value
    assert set(text) <= set("-.0123456789")
    assert not text.endswith(".")
    assert "." not in text or not text.endswith("0")
