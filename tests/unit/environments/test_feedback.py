from __future__ import annotations

import math
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nemo_like.batch.columns import Column, Layout
from nemo_like.data.interface import Observation
from nemo_like.environments.feedback import as_number, checked
from nemo_like.environments.interface import Failure, FailureKind, Feedback
from tests.unit.environments.asking import judge

SURROGATE = chr(0xDC80)
NUMBERS = [True, 1, 1.0, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)]


@pytest.mark.parametrize("one", NUMBERS, ids=lambda one: type(one).__name__)
def test_numbers_of_numpy_count_wherever_python_s_own_do(one: Any) -> None:
    feedback = checked(Feedback({"a": one}, is_done=one, metrics={"b": one}))
    assert feedback == Feedback({"a": 1.0}, metrics={"b": 1.0})
    assert {type(feedback.rewards["a"]), type(feedback.metrics["b"])} == {float}
    assert type(feedback.is_done) is bool


@pytest.mark.parametrize("other", ["1.0", None, 1j, [1.0], np.array([1.0]), np.str_("1"), np.complex64(1)])
def test_what_is_no_single_real_number_is_no_number(other: Any) -> None:
    assert as_number(other) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Feedback(metrics={"m": None}), "the metric 'm' is None, not a number"),  # type: ignore[dict-item]
        (Feedback({"a": "high"}), "the reward 'a' is 'high', not a number"),  # type: ignore[dict-item]
        (Feedback({1: 1.0}), "the name of a reward is 1, not text"),  # type: ignore[dict-item]
        (Feedback([1.0]), "the rewards are [1.0], not a mapping"),  # type: ignore[arg-type]
        (Feedback(1.0), "the rewards are 1.0, not a mapping"),  # type: ignore[arg-type]
        (Feedback(metrics={"m": "x"}), "the metric 'm' is 'x', not a number"),  # type: ignore[dict-item]
        (Feedback(metrics={"reward": 1.0}), "the metric 'reward' has a name that every environment has"),
        (Feedback(metrics={"num_failed_rewards/died": 1.0}), "has a name that every environment has already"),
        (Feedback(observation=b"x", is_done=False), "the observation is b'x', not text"),  # type: ignore[arg-type]
        (Feedback(observation=SURROGATE, is_done=False), "which UTF-8 cannot encode"),
        (Feedback({SURROGATE: 1.0}), "which UTF-8 cannot encode"),
        (Feedback(is_done="no"), "is_done is 'no', not true or false"),  # type: ignore[arg-type]
        (Feedback(is_done=False), "the environment is not done but has no observation"),
        (Feedback(failure="no"), "failure is 'no', not a Failure"),  # type: ignore[arg-type]
        (1.0, "the environment gave 1.0, not a Feedback"),
        (None, "the environment gave None, not a Feedback"),
    ],
)
def test_a_malformed_answer_is_a_failed_one_that_says_what_is_wrong(answer: object, reason: str) -> None:
    failure = checked(answer).failure
    assert failure is not None
    assert failure.kind is FailureKind.malformed
    assert reason in failure.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, np.float64("nan"), 10**400])
def test_numbers_that_float32_does_not_hold_fail_the_sample_in_rewards_and_in_metrics(value: Any) -> None:
    for answer in (Feedback({"a": value}), Feedback({"a": 1.0}, metrics={"m": value})):
        failure = checked(answer).failure
        assert failure is not None
        assert failure.kind is FailureKind.not_finite


def test_a_reason_that_utf_8_cannot_encode_can_still_be_written_down() -> None:
    feedback = checked(Feedback(failure=Failure(FailureKind.raised, f"no {SURROGATE}")))
    assert feedback.failure == Failure(FailureKind.raised, "no ?")


def test_feedback_that_is_well_formed_stays_as_it_is() -> None:
    state = {"moves": 1}
    answer = Feedback({"a": 0.5}, observation="go on", is_done=False, metrics={"m": 2.0}, state=state)
    assert checked(answer) == answer


PNG = BytesIO()
Image.new("RGB", (2, 2), "red").save(PNG, "PNG")


@pytest.mark.parametrize(
    ("observation", "images", "text"),
    [
        ([{"type": "text", "text": "see "}, {"type": "image", "image": PNG.getvalue()}], (), "see <image>"),
        ([{"type": "text", "text": "see "}, {"type": "image"}], [PNG.getvalue()], "see <image>"),
        ("see <image>", Image.new("RGB", (2, 2), "red"), "see <image>"),
        ("see", PNG.getvalue(), "<image>see"),
        (None, [PNG.getvalue()], "<image>"),
    ],
)
def test_an_observation_with_images_becomes_text_with_their_places(
    observation: Any, images: Any, text: str
) -> None:
    answer = checked(Feedback(observation=observation, images=images, is_done=False))
    assert answer.observation == text
    assert [picture.read() for picture in answer.images] == [PNG.getvalue()]
    assert checked(answer) == answer
    assert answer.said == Observation(text, tuple(answer.images))


def test_the_files_of_images_are_read_where_the_environment_runs(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG.getvalue())
    answer = checked(Feedback(observation="?", images=tmp_path / "a.png", is_done=False))
    assert [picture.source for picture in answer.images] == [PNG.getvalue()]


@pytest.mark.parametrize(
    ("observation", "images", "reason"),
    [
        ("?", "/gone.png", "the observation, image 1: /gone.png cannot be read"),
        ("?", 7, "the observation, image 1: int is neither a path"),
        ("<image><image>", [b"one"], "the text has <image> 2 times, and there are 1 images"),
        ([{"type": "video"}], (), "a part of a message is of type 'video'"),
        ([{"type": "image"}], (), "an image part of the messages has no image"),
    ],
)
def test_an_image_that_cannot_be_read_fails_its_sample(observation: Any, images: Any, reason: str) -> None:
    failure = checked(Feedback(observation=observation, images=images, is_done=False)).failure
    assert failure is not None
    assert failure.kind is FailureKind.bad_image
    assert reason in failure.reason


def test_the_mark_of_an_image_in_an_observation_without_images_is_text() -> None:
    answer = Feedback(observation="an <image> tag", is_done=False)
    assert checked(answer) == answer


MODULE = "tests.unit.environments.reward_functions"


@pytest.mark.parametrize(
    "function", ["python_number", "numpy_number", "numpy_bool", "zero_dimensional", "named", "awaited"]
)
def test_a_function_may_return_numbers_of_any_kind(function: str) -> None:
    feedback = checked(judge("function", "640", "640", function=f"{MODULE}:{function}"))
    assert feedback == Feedback({"reward": 1.0})


def test_a_function_that_raises_costs_its_turn_alone() -> None:
    feedback = judge("function", "x", function=f"{MODULE}:raising")
    assert feedback.failure == Failure(FailureKind.raised, "the reward raised KeyError: 'no such answer'")


def test_a_function_without_a_result_fails_its_sample_and_says_what_it_may_lack() -> None:
    failure = checked(judge("function", "x", function=f"{MODULE}:forgetful")).failure
    assert failure is not None
    assert failure.kind is FailureKind.abstained
    assert "a function without a return statement returns None too" in failure.reason


def test_a_component_that_abstains_is_left_out_of_the_reward() -> None:
    feedback = checked(Feedback({"format": 0.25, "correct": None}))
    assert feedback.failure is None
    assert feedback.rewards == {"format": 0.25, "correct": None}
    assert feedback.reward == 0.25


def test_a_sample_that_nothing_judged_has_no_reward() -> None:
    feedback = checked(Feedback({"format": None, "correct": None}), turn_number=7)
    assert feedback.failure is not None
    assert feedback.failure.kind is FailureKind.abstained
    assert "the reward is None (format, correct)" in feedback.failure.reason
    assert (feedback.reward, feedback.turn_number) == (None, 7)


def test_a_turn_that_goes_on_leaves_it_to_later_ones_to_judge() -> None:
    feedback = checked(Feedback({"correct": None}, observation="again", is_done=False))
    assert (feedback.failure, feedback.rewards) == (None, {"correct": None})


CREDIT = Column("credit", "float32", Layout.per_token)
LEVEL = Column("level", "uint8", Layout.per_sample, inner_shape=(2,))
IMAGES = Column("images", "", Layout.ragged)
NOTES = Column("notes", "", Layout.objects)
COLUMNS = (CREDIT, LEVEL, IMAGES, NOTES)


def test_columns_become_arrays_of_their_dtype() -> None:
    given = {
        "credit": [1, 0.5, 0],
        "level": (3.0, 4),
        "images": [[[1, 2]], np.zeros(3)],
        "notes": {"a": None},
    }
    feedback = checked(Feedback({"a": 1.0}, columns=given), COLUMNS, 3)
    assert feedback.failure is None
    assert (feedback.columns["credit"].tolist(), feedback.columns["credit"].dtype) == (
        [1, 0.5, 0],
        np.float32,
    )
    assert (feedback.columns["level"].tolist(), feedback.columns["level"].dtype) == ([3, 4], np.uint8)
    assert [image.shape for image in feedback.columns["images"]] == [(1, 2), (3,)]
    assert feedback.columns["notes"] == {"a": None}
    assert checked(feedback, COLUMNS, 3).columns.keys() == given.keys()


def test_arrays_of_another_machine_s_byte_order_are_turned() -> None:
    given = checked(Feedback({"a": 1.0}, columns={"images": [np.array([1.5], ">f4")]}), COLUMNS, 3)
    (image,) = given.columns["images"]
    assert image.dtype.isnative
    assert image.tolist() == [1.5]


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ([1.0], "the columns are [1.0], not a mapping of names to values"),
        (
            {"credits": [1.0]},
            "it brings the columns ['credits'], and declares ['credit', 'images', 'level', ",
        ),
        ({"credit": [1.0, 2.0]}, "column 'credit' has shape [2], where [3] is declared for 3 tokens"),
        ({"credit": ["a", "b", "c"]}, "column 'credit': ['a', 'b', 'c'] is no array of numbers"),
        ({"credit": [1j, 1, 1]}, "column 'credit' is declared float32, and complex128 is no such number"),
        ({"credit": [1, np.nan, 1]}, "column 'credit' has values that are not finite in float32"),
        ({"level": 1}, "column 'level' has shape [], where [2] is declared"),
        ({"level": [0.5, 1]}, "column 'level' is declared uint8, which cannot hold"),
        ({"level": [-1, 1]}, "column 'level' is declared uint8, which cannot hold"),
        ({"images": 5}, "column 'images' takes a list of arrays, not 5"),
        ({"images": [np.array([1], np.longdouble)]}, "column 'images' takes arrays of bool, uint8, int8"),
        ({"images": [np.array([np.nan])]}, "column 'images' has values that are not finite"),
        ({"images": [torch.tensor([torch.inf])]}, "column 'images' has values that are not finite"),
        ({"credit": [1e300, 1, 1]}, "column 'credit' has values that are not finite in float32"),
        ({"images": ["a"]}, "column 'images': 'a' is no array of numbers"),
    ],
)
def test_a_column_that_does_not_fit_fails_its_sample(columns: Any, reason: str) -> None:
    failure = checked(Feedback({"a": 1.0}, columns=columns), COLUMNS, 3).failure
    assert failure is not None
    assert reason in failure.reason


@pytest.mark.parametrize(
    "answer", [Feedback({"a": 1.0}), Feedback({"a": None}), Feedback.failed(FailureKind.raised, "why"), 1.0]
)
def test_an_answer_names_the_turn_that_it_is_for(answer: Any) -> None:
    assert checked(answer, turn_number=7).turn_number == 7
