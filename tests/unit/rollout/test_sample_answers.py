from __future__ import annotations

import pytest

from nemo_like.data.arithmetic import ArithmeticDataset, as_written
from nemo_like.data.interface import Message
from nemo_like.environments.interface import Feedback
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.sample_answers import sample_answer
from tests.unit.rollout.conversations import conversation, response


def answered(text, reward, **example):
    sample = conversation(**example)
    sample.add_response(response([7]), text, 3)
    sample.add_feedback(Feedback({"reward": reward}))
    return sample_answer(sample, solved_reward=1.0)


def addition(text, reward):
    return answered(text, reward, prompt="54+84=", answer="390", as_written=as_written)


def test_a_problem_is_shown_as_its_task_says_people_write_it():
    assert addition("390", 1.0) == SampleAnswer("45+48=", "93", "93", 1.0, is_solved=True)
    assert addition("290", 0.0) == SampleAnswer("45+48=", "92", "93", 0.0, is_solved=False)
    assert ArithmeticDataset(2, "validation")[0].as_written is as_written


@pytest.mark.parametrize("text", ["39", "3900"])
def test_what_people_would_write_like_the_right_answer_is_shown_as_it_is_where_it_is_wrong(text):
    assert addition(text, 0.0) == SampleAnswer("54+84=", text, "390", 0.0, is_solved=False)


def test_an_answer_is_solved_from_the_reward_on_that_the_run_names():
    assert not answered("x", 0.5).is_solved
    assert answered("x", 1.0).is_solved


def test_the_prompt_of_a_conversation_is_its_last_message_and_ends_before_the_response():
    prompt = (Message("system", "Be brief."), Message("user", "How much?"))
    assert answered("Much.", 0.0, prompt=prompt).prompt == "How much?\n"
    begun = (*prompt, Message("assistant", "So"))
    assert answered(" much.", 0.0, prompt=begun).prompt == "So"
