from __future__ import annotations

import pytest

from tests.lacking import REASONING_GYM

pytest.importorskip("reasoning_gym", reason=REASONING_GYM)

from nemo_like.data.reasoning_gym import ReasoningGymDataset


def test_problems_have_question_answer_and_what_their_scorer_needs() -> None:
    dataset = ReasoningGymDataset("leg_counting", {"size": 5}, "train")
    assert len(dataset) == 5
    example = dataset[4]
    assert "leg" in example.prompt
    assert example.answer.isdigit()
    assert example.data["metadata"]["source_dataset"] == "leg_counting"
    with pytest.raises(IndexError, match="no problem 5 in a reasoning-gym dataset of 5"):
        dataset[5]


def test_training_and_validation_differ_and_both_repeat() -> None:
    def prompts(split):
        dataset = ReasoningGymDataset("basic_arithmetic", {"size": 20}, split)
        return [dataset[index].prompt for index in range(20)]

    assert prompts("train") == prompts("train")
    assert not set(prompts("train")) & set(prompts("validation"))


@pytest.mark.parametrize(("name", "options"), [("leg_countin", {}), ("leg_counting", {"legs": 2})])
def test_a_wrong_name_or_option_is_refused_with_both(name: str, options: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=rf"data\.train\.path={name} with options .*seed"):
        ReasoningGymDataset(name, options, "train")
