from __future__ import annotations

import pytest

from nemo_like.environments.text_match import f1_score
from tests.unit.environments.asking import ask, judge, turn


@pytest.mark.parametrize(
    ("response", "is_truncated", "reward"),
    [
        ("640", False, 1.0),
        ("640", True, 0.0),
        ("641", False, 0.0),
        ("6400", False, 0.0),
        (" 640", False, 0.0),
        ("6<pad>40", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_arithmetic_rewards_only_the_exact_and_ended_answer(response, is_truncated, reward):
    (feedback,) = ask("arithmetic", turn(response, "640", is_truncated=is_truncated))
    assert feedback.rewards == {"exact_match": reward}
    assert feedback.is_done
    assert feedback.observation is None


@pytest.mark.parametrize(
    ("response", "options", "reward"),
    [
        (" 42\n", {}, 1.0),
        ("The answer: 42", {}, 0.0),
        ("answer: 41, no, answer: 42", {"answer_pattern": r"answer: (\w+)"}, 1.0),
        ("answer: 42, no, answer: 41", {"answer_pattern": r"answer: (\w+)"}, 0.0),
        ("42", {"answer_pattern": r"answer: (\w+)"}, 0.0),
        ("", {}, 0.0),
    ],
)
def test_an_exact_match_is_of_the_last_answer_spaces_aside(response, options, reward):
    assert judge("exact_match", response, "42", **options).rewards == {"exact_match": reward}


def test_case_counts_unless_it_is_told_not_to():
    assert judge("exact_match", "Paris", "paris").reward == 0.0
    assert judge("exact_match", "Paris", "paris", ignore_case=True).reward == 1.0


def test_a_truncated_match_counts_only_where_an_end_is_not_asked_for():
    cut = turn("42", "42", is_truncated=True)
    assert ask("exact_match", cut)[0].reward == 0.0
    assert ask("exact_match", cut, must_end=False)[0].reward == 1.0


@pytest.mark.parametrize(
    ("answer", "reference", "f1"),
    [
        ("the cat sat", "a cat sat", 1.0),  # articles do not count
        ("cat sat down", "cat sat", 0.8),  # precision 2/3, recall 1: 2 * 2 / (3 + 2)
        ("cat cat", "cat", 2 / 3),  # as multisets: one shared of two and one
        ("Cat, sat!", "cat sat", 1.0),
        ("dog", "cat", 0.0),
        ("", "cat", 0.0),
        ("the", "", 1.0),  # nothing is left of either
    ],
)
def test_f1_is_of_words_as_multisets(answer, reference, f1):
    assert f1_score(answer, reference) == pytest.approx(f1)
    assert judge("f1", answer, reference).rewards == {"f1": pytest.approx(f1)}


@pytest.mark.parametrize(
    ("pattern", "response", "reward"),
    [
        ("<think>.*</think>", "<think>one\ntwo</think> 3", 1.0),
        ("<think>.*</think>", "<think>one", 0.0),
        (r"^\d+$", "42", 1.0),
        (r"^\d+$", "about 42", 0.0),
    ],
)
def test_a_regular_expression_is_searched_across_lines(pattern, response, reward):
    assert judge("regex", response, pattern=pattern).rewards == {"regex": reward}
