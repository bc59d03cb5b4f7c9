from __future__ import annotations

import itertools

import pytest

from nemo_like.algorithms.held_out import Answers, held_out_metrics, majority_reward, pass_at_k


def test_pass_at_k_is_the_share_of_draws_with_a_right_answer():
    # Of 4 answers 1 is right: half of the 6 pairs have it.
    assert pass_at_k(4, 1, 2) == 0.5
    for num_answers, num_solved, k in [(5, 2, 3), (6, 1, 4), (4, 4, 2), (4, 0, 3)]:
        draws = list(itertools.combinations(range(num_answers), k))
        lucky = sum(any(answer < num_solved for answer in draw) for draw in draws)
        assert pass_at_k(num_answers, num_solved, k) == pytest.approx(lucky / len(draws))


def test_more_draws_than_answers_are_refused():
    with pytest.raises(ValueError, match="pass@5 of 4 answers"):
        pass_at_k(4, 1, 5)


def test_the_majority_decides_by_what_is_said_most():
    # Two say 0 (wrong), three say 1 (right).
    assert majority_reward(Answers([0.0, 1.0, 0.0, 1.0, 1.0], [0, 1, 0, 1, 1])) == 1.0


def test_a_draw_goes_to_what_was_said_first():
    assert majority_reward(Answers([0.0, 1.0], [0, 1])) == 0.0


def test_one_answer_each_gives_accuracy_alone():
    problems = [Answers([1.0], [0]), Answers([0.0], [0])]
    assert held_out_metrics(problems, 1, solved_at=1.0) == {"accuracy": 0.5, "reward": 0.5}


def test_a_reward_between_right_and_wrong_is_no_share_of_an_accuracy():
    problems = [Answers([0.75], [0]), Answers([2.5], [0]), Answers([-1.0], [0])]
    assert held_out_metrics(problems, 1, solved_at=1.0) == {"accuracy": 1 / 3, "reward": 0.75}
    assert held_out_metrics(problems, 1, solved_at=0.5)["accuracy"] == 2 / 3


def test_several_answers_each():
    problems = [
        Answers([1.0, 0.0, 0.0, 0.0], [0, 1, 1, 2]),  # one right answer, outvoted
        Answers([1.0, 1.0, 0.5, 0.0], [0, 0, 1, 2]),  # two right, and the majority
    ]
    assert held_out_metrics(problems, 4, solved_at=1.0) == pytest.approx(
        {
            "accuracy": 3 / 8,
            "reward": 3.5 / 8,
            "pass@1": (1 / 4 + 2 / 4) / 2,
            "pass@2": (1 / 2 + 5 / 6) / 2,
            "pass@4": 1.0,
            "mean@4": 3 / 8,
            "majority@4": 0.5,
        }
    )


def test_answers_that_could_not_be_judged_are_left_out():
    problems = [Answers([1.0], [0]), Answers([], [])]
    metrics = held_out_metrics(problems, 3, solved_at=1.0)
    assert (metrics["accuracy"], metrics["pass@1"], metrics["mean@3"], metrics["majority@3"]) == (1, 1, 1, 1)
    assert not metrics.keys() & {"pass@2", "pass@3"}


def test_problems_that_nobody_could_judge_give_no_figures_at_all():
    assert held_out_metrics([Answers([], []), Answers([], [])], 2, solved_at=1.0) == {}
