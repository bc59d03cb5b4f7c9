from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest

from nemo_like.config.keys import Key
from nemo_like.config.kind_options import kind_option_problems


@dataclass(kw_only=True, slots=True)
class PressOptions:
    path: Annotated[str, Key("where it prints")]
    copies: Annotated[int, Key("of each page", 1, at_least=1)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "x", "copies": 1, "copeis": 2}, "a.press.copeis is not a key of the configuration"),
        ({"path": "x", "copies": "two"}, "a.press.copies='two' must be an integer"),
        ({"copies": 1}, "a.press.path has no value, and kind=press needs one; set it"),
        ({"path": "x", "copies": 0}, "a.press.copies=0 must be at least 1"),
    ],
)
def test_a_mistake_is_told_by_its_full_key(options: dict[str, object], message: str) -> None:
    (problem,) = kind_option_problems("a.press", options, PressOptions, "kind=press")
    assert str(problem).startswith(message)


def test_the_file_with_the_others_is_named_and_what_fits_has_no_mistakes() -> None:
    (problem,) = kind_option_problems("a", {"copies": 1}, PressOptions, "kind=press", "press.yaml")
    assert problem.remedy == "set it; press.yaml has the others"
    assert kind_option_problems("a", {"path": "x", "copies": 2}, PressOptions, "kind=press") == []
