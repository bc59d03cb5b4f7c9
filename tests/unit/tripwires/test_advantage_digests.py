"""A digest of a sample and its advantage."""

from __future__ import annotations

import torch

from nemo_like.tripwires.advantage_digests import advantage_digests


def test_a_digest_tells_samples_and_advantages_apart() -> None:
    digests = advantage_digests([7, 7, 8, 8], [0.5, -0.5, 0.5, 0.5])
    assert len(set(digests)) == 3
    assert digests[2] == digests[3] < 2**31


def test_an_advantage_is_that_of_float32() -> None:
    rounded = torch.tensor([0.1, float("nan")]).tolist()
    assert advantage_digests([1, 2], rounded) == advantage_digests([1, 2], [0.1, float("nan")])
    assert advantage_digests([1], [0.1]) != advantage_digests([1], [float(torch.tensor(0.1).bfloat16())])
