"""Log-probs and likely tokens with the vocabulary over several ranks, against the vocabulary on one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.algorithms.logprobs import (
    LogprobSettings,
    VocabularyShard,
    linear_scores,
    most_likely_ids,
)
from nemo_like.cluster.coordinates import Coordinates, ParallelLayout
from tests.functional.worlds import WorldPool

NUM_TOKENS, HIDDEN, K = 30, 8, 6
# Rows that each rank has; those beyond the vocabulary are padding.
ROWS, VOCABULARY = 26, 50
SETTINGS = LogprobSettings(temperature=0.7, with_entropy=True, max_chunk_bytes=4 * ROWS * 7)
SLOPES = torch.linspace(-2, 3, NUM_TOKENS * (K + 2)).view(NUM_TOKENS, K + 2)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, dtype=torch.float64, generator=generator)
    weight = torch.randn(2 * ROWS, HIDDEN, dtype=torch.float64, generator=generator)
    weight[[7, 19, 33]] = weight[28].clone()  # on both ranks, tokens that are always equally likely
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)


def computed(shard: VocabularyShard, rows: slice) -> list[Tensor]:
    """Log-probs, entropy, likely ids, their log-probs, and the gradients of hidden states and weight."""
    hidden, weight, token_ids = inputs()
    hidden, weight = hidden.requires_grad_(), weight[rows].clone().requires_grad_()
    topk_ids = most_likely_ids(hidden, weight, K, shard, SETTINGS)
    scores = linear_scores(hidden, weight, token_ids, shard, SETTINGS, topk_ids)
    assert scores.entropy is not None
    assert scores.topk_logprobs is not None
    values = (scores.logprobs, scores.entropy, scores.topk_logprobs)
    torch.autograd.backward(values, (SLOPES[:, 0], SLOPES[:, 1], SLOPES[:, 2:]))
    if shard.group is not None:
        dist.all_reduce(hidden.grad, group=shard.group)
    return [*(value.detach() for value in values), topk_ids, hidden.grad, weight.grad]


def on_every_rank(coordinates: Coordinates) -> list[Tensor]:
    first = coordinates.rank * ROWS
    shard = VocabularyShard(first=first, num_valid=min(ROWS, VOCABULARY - first), group=dist.group.WORLD)
    return computed(shard, slice(first, first + ROWS))


def test_two_ranks_compute_what_one_does(pool: WorldPool) -> None:
    whole = VocabularyShard(first=0, num_valid=VOCABULARY, group=None)
    *values, topk_ids, hidden_grad, weight_grad = computed(whole, slice(0, 2 * ROWS))
    for rank, found in enumerate(pool.run(on_every_rank, ParallelLayout(tp=2, cp=1, dp=1, pp=1))):
        for one, other in zip(found[:3], values, strict=True):
            torch.testing.assert_close(one, other)
        assert torch.equal(found[3], topk_ids)
        torch.testing.assert_close(found[4], hidden_grad)
        torch.testing.assert_close(found[5], weight_grad[rank * ROWS : (rank + 1) * ROWS])
    is_tied = [set(row) & {7, 19, 28, 33} for row in topk_ids.tolist()]
    assert {7, 19} in is_tied or {7} in is_tied  # a tie was cut off, so the lower ids had to be chosen


def likely_of_a_small_shard(coordinates: Coordinates) -> list[list[list[int]] | str]:
    """Rank 0 has one token, rank 1 three."""
    weight = torch.tensor([[[2.0], [0.0], [0.0]], [[1.0], [3.0], [2.0]]])[coordinates.rank]
    shard = VocabularyShard(
        first=3 * coordinates.rank, num_valid=(1, 3)[coordinates.rank], group=dist.group.WORLD
    )
    found: list[list[list[int]] | str] = []
    for k in (4, 5):
        try:
            found.append(most_likely_ids(torch.ones(1, 1), weight, k, shard, SETTINGS).tolist())
        except ValueError as error:
            found.append(str(error))
    return found


def test_a_rank_with_fewer_tokens_than_are_asked_for(pool: WorldPool) -> None:
    layout = ParallelLayout(tp=2, cp=1, dp=1, pp=1)
    for ids, error in pool.run(likely_of_a_small_shard, layout):
        assert ids == [[4, 0, 5, 3]]
        assert "fewer than 5 tokens" in error
