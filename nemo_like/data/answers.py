"""Reference answers as text. Every data source converts its answers here."""

from __future__ import annotations

import numbers
import reprlib
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any


def answer_text(value: Any, where: str) -> str:
    """Return a reference answer as a model would write it; None becomes empty text.

    Numbers are plain decimals without an exponent or a fraction of zeros: 3.0 is ``3``, 1e-05 ``0.00001``.
    True and false are ``True`` and ``False``, dates as in ISO 8601. Raises ValueError, whose text begins with
    ``where``, for a list, a mapping and any other value that is no text, and for a number that is not finite.
    """
    match value:
        case None:
            return ""
        case str():
            return value
        case bool() | numbers.Integral() | date() | time() | timedelta():
            return str(value)
        case Decimal() | numbers.Real():
            return _plain_number(value, where)
    raise ValueError(
        f"{where}: the answer is {reprlib.repr(value)} ({type(value).__name__}), and answers are compared as "
        "texts: write it as text; or, for a reward that needs it as it is, keep it in another field, which "
        "the environment gets as data, and name a field with text (or null) in data.*.answer_key"
    )


def _plain_number(value: Any, where: str) -> str:
    # The shortest text that stands for this very float, then without its exponent.
    number = value if isinstance(value, Decimal) else Decimal(repr(float(value)))
    if not number.is_finite():
        raise ValueError(f"{where}: the answer is {value}, which no response can be; correct or delete it")
    text = format(number, "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text
