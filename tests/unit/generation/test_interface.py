"""Requests refuse what an engine cannot serve; results survive the wire."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.generation.interface import GroupRequest, GroupResult, Response, VersionSpan


def test_consecutive_seeds_are_accepted() -> None:
    assert GroupRequest("r", (3, 4), (16, 17, 18)).seeds == (16, 17, 18)


@pytest.mark.parametrize("seeds", [(), (1, 3), (2, 1), (-1, 0), (2**63 - 1, 2**63), (4, 4)])
def test_seeds_that_one_engine_request_cannot_have_are_refused(seeds: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="must be consecutive integers"):
        GroupRequest("r", (3, 4), seeds)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        GroupRequest("r", (), (0,))


def test_a_pickled_result_has_the_same_responses_and_can_be_written_to() -> None:
    routes = {"columns": {"routes": np.array([3, 4, 0])}, "context_columns": {"routes": np.array([1, 2])}}
    responses = (
        Response(np.array([5, 6, 1], np.int32), np.array([-0.5, -1.5, -0.25], np.float32), False, **routes),
        Response(
            np.array([7], np.int32),
            np.array([-2.0], np.float32),
            True,
            {"routes": np.array([0])},
            {"routes": np.array([1, 2])},
        ),
    )
    result = pickle.loads(pickle.dumps(GroupResult("train/3/0", responses, 7)))
    assert (result.request_id, result.policy_version) == ("train/3/0", 7)
    for got, sent in zip(result.responses, responses, strict=True):
        assert got.token_ids.dtype == np.int32
        assert got.logprobs.dtype == np.float32
        assert got.is_truncated == sent.is_truncated
        np.testing.assert_array_equal(got.token_ids, sent.token_ids)
        np.testing.assert_array_equal(got.logprobs, sent.logprobs)
    first = result.responses[0]
    assert (first.columns["routes"].tolist(), first.context_columns["routes"].tolist()) == ([3, 4, 0], [1, 2])
    result.responses[0].logprobs[0] = 0.0
    assert result.responses[1].logprobs[0] == -2.0


def test_a_packed_result_has_no_object_per_response() -> None:
    """1024 responses in tens of kilobytes: tokens and log-probs, eight bytes each, dominate."""
    response = Response(np.zeros(4, np.int32), np.zeros(4, np.float32), False)
    small = len(pickle.dumps(GroupResult("r", (response,) * 8, 0)))
    large = len(pickle.dumps(GroupResult("r", (response,) * 1032, 0)))
    assert large - small < 1024 * (4 * 8 + 8)


def test_a_group_says_which_versions_sampled_each_response() -> None:
    def response(*versions: int) -> Response:
        columns = {POLICY_VERSIONS.name: np.array(versions, np.int32)} if versions else {}
        return Response(np.array([5], np.int32), np.array([-0.5], np.float32), False, columns)

    result = pickle.loads(pickle.dumps(GroupResult("r", (response(3, 3, 5), response(5)), 5)))
    assert result.version_spans() == (VersionSpan(3, 5), VersionSpan(5, 5))
    assert result.responses[0].columns[POLICY_VERSIONS.name].dtype == np.int32
    assert GroupResult("r", (response(),), 4).version_spans() == (VersionSpan(4, 4),)


def test_the_text_of_a_server_survives_the_wire() -> None:
    ids, logprobs = np.array([5, 1], np.int32), np.zeros(2, np.float32)
    responses = (Response(ids, logprobs, False, text="ab"), Response(ids, logprobs, False))
    result = pickle.loads(pickle.dumps(GroupResult("validation/3/0", responses, -1)))
    assert [one.text for one in result.responses] == ["ab", None]
