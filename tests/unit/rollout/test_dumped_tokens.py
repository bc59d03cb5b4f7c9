from __future__ import annotations

import numpy as np
import pytest

from nemo_like.batch.columns import ENTROPIES, PREV_LOGPROBS, ROLLOUT_COLUMNS
from nemo_like.data.interface import SourceReport
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.rollout.dumped_tokens import fetch_scores
from nemo_like.rollout.prompts import PromptOrigin, prompt_origin


def test_scores_are_fetched_by_sample_and_only_of_batches_that_were_scored() -> None:
    plane = InMemoryDataPlane()
    plane.open_partition("train-1", [*ROLLOUT_COLUMNS, PREV_LOGPROBS, ENTROPIES])
    tokens = {
        "input_ids": np.zeros(5, np.int32),
        "response_mask": np.array([0, 1, 0, 1, 1], np.uint8),
        "generation_logprobs": np.zeros(5, np.float32),
    }
    put = plane.put("train-1", tokens, lengths=(2, 3), chunk_sizes=(1, 1), tags={})
    scored = plane.write(
        put,
        {
            "prev_logprobs": np.array([0, -1, 0, -2, -3], np.float32),
            "entropies": np.array([0, 1.5, 0, 0.5, 0.25], np.float32),
        },
    )
    first, second = put.sample_ids
    # The driver may have put the samples into another order, and dropped some unscored.
    scores = fetch_scores(plane, [scored.subset([1]), put.subset([0])])
    assert {name: values.tolist() for name, values in scores[second].items()} == {
        "prev_logprobs": [0.0, -2.0, -3.0],
        "entropies": [0.0, 0.5, 0.25],
    }
    assert first not in scores


def test_the_place_of_a_problem_counts_within_its_source() -> None:
    sources = [
        SourceReport(name=name, num_prompts=size, num_too_long=0, digest="")
        for name, size in (("a", 3), ("b", 2))
    ]
    places = [prompt_origin(index, sources) for index in (0, 2, 3, 4)]
    assert places == [
        *(PromptOrigin("a", 0), PromptOrigin("a", 2)),
        *(PromptOrigin("b", 0), PromptOrigin("b", 1)),
    ]
    with pytest.raises(IndexError, match="no problem 5 in 2 sources of 5 together"):
        prompt_origin(5, sources)
