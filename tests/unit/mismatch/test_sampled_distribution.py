from __future__ import annotations

import math

import pytest
import torch

from nemo_like.generation.sampling import SamplingSettings
from nemo_like.mismatch.sampled_distribution import log_distribution

PROBABILITIES = (0.5, 0.25, 0.125, 0.125)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, PROBABILITIES),
        ({"top_k": 2}, (2 / 3, 1 / 3, 0, 0)),
        ({"top_p": 0.5}, (1, 0, 0, 0)),
        ({"top_p": 0.7}, (2 / 3, 1 / 3, 0, 0)),
        ({"min_p": 0.5}, (2 / 3, 1 / 3, 0, 0)),
        ({"temperature": 0.5}, (8 / 11, 2 / 11, 0.5 / 11, 0.5 / 11)),  # their squares
    ],
)
def test_a_setting_leaves_the_tokens_that_it_names(settings: dict[str, float], expected: list[float]) -> None:
    logits = torch.tensor([[math.log(one) for one in PROBABILITIES]])
    given = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_new_tokens": 1} | settings
    found = log_distribution(logits, SamplingSettings(**given)).exp()[0].tolist()
    assert found == pytest.approx(expected)
