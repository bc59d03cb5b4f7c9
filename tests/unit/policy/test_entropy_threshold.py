"""The entropy from which on tokens train, as sorting all tokens would find it."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_like.policy.loss.entropy_threshold import entropy_threshold


@pytest.mark.parametrize(
    ("share", "expected"), [(0.2, 3.0), (0.21, 2.0), (0.4, 2.0), (0.5, 0.5), (1.0, 0.0), (1e-9, 3.0)]
)
def test_the_threshold_is_the_last_of_the_share_of_highest_entropy(share: float, expected: float) -> None:
    assert entropy_threshold(torch.tensor([0.5, 3.0, 0.0, 2.0, 0.25]), share, None) == expected


def test_equal_entropies_train_together() -> None:
    assert entropy_threshold(torch.tensor([1.0, 1.0, 1.0, 0.0]), 0.25, None) == 1.0


def test_without_a_token_every_entropy_is_above_the_threshold() -> None:
    assert entropy_threshold(torch.zeros(0), 0.2, None) == 0.0


@pytest.mark.parametrize("share", [0.07, 0.2, 0.5, 0.93])
def test_it_is_what_sorting_finds(share: float) -> None:
    torch.manual_seed(0)
    entropies = torch.cat((torch.rand(400) * 3, torch.rand(100) * 1e-6))
    found = entropy_threshold(entropies, share, None)
    assert found == entropies.sort(descending=True).values[math.ceil(share * 500) - 1].item()


def test_ranks_that_count_the_same_tokens_change_nothing() -> None:
    torch.manual_seed(1)
    entropies = torch.rand(101)
    assert entropy_threshold(entropies.repeat(3), 0.2, None) == entropy_threshold(entropies, 0.2, None)
