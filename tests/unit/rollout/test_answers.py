from __future__ import annotations

import pytest

from nemo_like.rollout.answers import answer_ids, final_answer


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("  640 ", "640"),
        ("First \\boxed{1}, no: \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("<answer>\n 3   apples </answer> bye", "3 apples"),
        ("so 2 + 2\n#### 4\n", "4"),
    ],
)
def test_the_last_marked_answer_counts_or_else_the_whole_response(response: str, answer: str) -> None:
    assert final_answer(response) == answer


def test_responses_that_say_the_same_share_a_number() -> None:
    assert answer_ids(["#### 4", "five", "\\boxed{4}", " five "]) == [0, 1, 0, 1]
