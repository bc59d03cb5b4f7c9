from __future__ import annotations

import math

import pytest

from nemo_like.rollout.sample_tags import answer_ids, component_tags, final_answer


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


REWARDS = [{"correct": 1.0, "format": 0.5}, {"correct": 0.0}, {}]


def test_asked_components_become_tags_with_zero_where_a_sample_has_none() -> None:
    assert component_tags(["format"], REWARDS) == {"reward/format": [0.5, 0.0, 0.0]}
    assert component_tags([], REWARDS) == {}


def test_a_component_that_abstains_is_no_zero() -> None:
    tags = component_tags(["format"], [{"format": None, "correct": 1.0}, {"format": 0.5}])["reward/format"]
    assert math.isnan(tags[0])
    assert tags[1] == 0.5


def test_a_component_that_nobody_gives_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"reward_weights\.style: .* there are correct, format"):
        component_tags(["style"], REWARDS)


def test_when_every_reward_failed_nothing_can_be_said_about_names() -> None:
    assert component_tags(["style"], [{}, {}]) == {"reward/style": [0.0, 0.0]}
