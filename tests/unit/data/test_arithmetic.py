from __future__ import annotations

import itertools
import random

import pytest

from nemo_like.data.arithmetic import (
    ArithmeticDataset,
    addition_answer,
    addition_prompt,
    as_written,
    is_held_out,
)
from scripts.demo_model.sums import Sum


def test_operands_and_answer_are_zero_padded_and_reversed():
    assert addition_prompt(12, 34, digits=2) == "21+43="
    assert addition_answer(12, 34, digits=2) == "640"
    assert addition_prompt(5, 0, digits=2) == "50+00="
    assert addition_answer(99, 99, digits=2) == "891"
    assert addition_answer(7, 8, digits=3) == "5100"


def test_the_held_out_pairs_stay_the_same_for_ever():
    # A model trained with another split would have seen its validation problems.
    assert [(x, y) for x in range(2) for y in range(40) if is_held_out(x, y)][:6] == [
        (0, 4), (0, 6), (0, 7), (0, 10), (0, 31), (0, 33),
    ]  # fmt: skip


def test_two_operands_are_held_out_in_both_orders_or_in_none():
    pairs = [(x, y) for x in range(100) for y in range(100)]
    assert all(is_held_out(x, y) == is_held_out(y, x) for x, y in pairs)
    assert sum(is_held_out(x, y) for x, y in pairs) == 990


def test_three_terms_are_held_out_in_every_order_or_in_none():
    draws = random.Random(3)
    for _ in range(200):
        terms = [draws.randrange(10, 100) for _ in range(3)]
        assert len({Sum(order).is_held_out for order in itertools.permutations(terms)}) == 1


def test_the_splits_share_no_problem_and_make_up_all_pairs():
    prompts = {
        split: {dataset[i].prompt for i in range(len(dataset))}
        for split, dataset in ((s, ArithmeticDataset(2, s)) for s in ("train", "validation"))
    }
    assert not prompts["train"] & prompts["validation"]
    assert prompts["train"] | prompts["validation"] == {
        addition_prompt(x, y, 2) for x in range(100) for y in range(100)
    }
    assert 900 < len(prompts["validation"]) < 1100


def test_every_last_digit_occurs_in_both_splits():
    for split in ("train", "validation"):
        dataset = ArithmeticDataset(2, split)
        last_digits = {(dataset[i].prompt[0], dataset[i].prompt[3]) for i in range(len(dataset))}
        assert len(last_digits) == 100


def test_answers_belong_to_their_prompts():
    dataset = ArithmeticDataset(2, "train")
    for i in range(0, len(dataset), 97):
        left, right = dataset[i].prompt.rstrip("=").split("+")
        assert int(dataset[i].answer[::-1]) == int(left[::-1]) + int(right[::-1])


def test_any_prefix_is_a_fair_sample_of_operands():
    dataset = ArithmeticDataset(2, "validation")
    left = [int(dataset[i].prompt[:2][::-1]) for i in range(200)]
    assert 40 < sum(left) / len(left) < 60


def test_two_instances_have_the_same_order():
    first, second = ArithmeticDataset(2, "validation"), ArithmeticDataset(2, "validation")
    assert [first[i] for i in range(50)] == [second[i] for i in range(50)]


def test_an_index_outside_the_dataset_is_an_error():
    dataset = ArithmeticDataset(1, "validation")
    with pytest.raises(IndexError, match=f"of {len(dataset)}"):
        dataset[len(dataset)]
    with pytest.raises(IndexError):
        dataset[-1]


@pytest.mark.parametrize("digits", [0, 4])
def test_unsupported_digits_are_an_error_with_the_range(digits):
    with pytest.raises(ValueError, match=f"digits={digits} must be from 1 to 3"):
        ArithmeticDataset(digits, "train")


def test_a_problem_says_how_people_write_it():
    example = ArithmeticDataset(2, "validation")[0]
    left, right = example.as_written(example.prompt).rstrip("=").split("+")
    assert int(example.as_written(example.answer)) == int(left) + int(right)
    texts = ("21+43=", "640", "50+00=", "x")
    assert [as_written(text) for text in texts] == ["12+34=", "46", "5+0=", "x"]
