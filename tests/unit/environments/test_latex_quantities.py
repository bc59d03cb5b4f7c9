"""Quantities that LaTeX typesets, and the texts that only look like them."""

from __future__ import annotations

import itertools
import re

import pytest

from nemo_like.environments.latex_quantities import plain_quantity
from nemo_like.rollout.sample_tags import answer_ids
from tests.unit.environments.asking import judge

SAME = [
    (r"50\%", "50%"),
    (r"-12.5\%", "-12.5%"),
    (r"50 \%", "50 %"),
    (r"50\,\%", "50%"),
    (r"\$50", "$50"),
    (r"-\$1,234.50", "-$1,234.50"),
    (r"10\,000", "10000"),
    (r"1\!000\!000", "1000000"),
    (r"10,\!000", "10000"),
    (r"90^\circ", "90°"),
    (r"90^{\circ}", "90°"),
    (r"20^\circ C", "20° C"),
]
OTHER = [
    *("50%", "fifty", r"\frac{1}{2}", r"echo \$1 and \$2", r"C:\,new", r"printf '5\%d'", r"x^\circ"),
    *(r"(1,\,200)", r"1,\,200", r"10\,00", r"a\!b", r"\%", r"f \circ g", r"2^\circled"),
]


@pytest.mark.parametrize(("typeset", "plain"), SAME)
def test_a_number_with_its_unit_becomes_plain(typeset: str, plain: str) -> None:
    assert plain_quantity(typeset) == plain


@pytest.mark.parametrize("text", OTHER)
def test_everything_else_stays_as_it_is(text: str) -> None:
    assert plain_quantity(text) == text


def _is_exact(response: str, answer: str) -> bool:
    return judge("exact_match", response, answer, answer_pattern=None).reward == 1.0


@pytest.mark.parametrize(("typeset", "plain"), SAME)
def test_exact_match_takes_a_quantity_as_latex_or_plain(typeset: str, plain: str) -> None:
    assert _is_exact(typeset, plain)
    assert _is_exact(plain, typeset)
    assert not _is_exact(typeset, re.sub(r"\d", "7", plain, count=1))


def test_exact_match_takes_no_text_for_another() -> None:
    assert [(one, other) for one, other in itertools.permutations(OTHER, 2) if _is_exact(one, other)] == []
    assert not _is_exact(r"echo \$1", "echo $1")
    assert not _is_exact("50", "50%")


def test_answers_that_differ_in_typesetting_alone_vote_together() -> None:
    assert answer_ids([r"\boxed{50\%}", "#### 50%", r"\boxed{50}"]) == [0, 0, 1]


ALIKE = [
    ("50%", r"50\%"),
    (r"\$50", "$50", "50"),
    (r"10\,000", "10000", "10,000", r"10{,}000", r"10,\!000"),
    (r"90^\circ", "90°", r"90^{\circ}", "90"),
    (r"\$1,234.50", "1234.5"),
]


@pytest.mark.parametrize("alike", ALIKE, ids=lambda alike: alike[0])
def test_math_verify_reads_all_ways_to_write_a_quantity_alike(alike: tuple[str, ...]) -> None:
    for answer, given in itertools.product(alike, repeat=2):
        feedback = judge("math_verify", rf"It is \boxed{{{given}}}.", answer)
        assert feedback.failure is None
        assert feedback.reward == 1.0, (answer, given)


@pytest.mark.parametrize(
    ("answer", "given"),
    [
        ("50", "50%"),
        ("50", r"50\%"),
        (r"50\%", r"5\%"),
        ("1200", r"(1,\,200)"),
        (r"90^\circ C", "90"),
        (r"90^\circ C", "90°"),
        (r"10\,000", "10"),
        (r"\$50", "500"),
    ],
)
def test_math_verify_takes_no_other_quantity_for_it(answer: str, given: str) -> None:
    assert judge("math_verify", rf"It is \boxed{{{given}}}.", answer).reward == 0.0
