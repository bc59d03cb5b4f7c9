"""Which tokens of a row a context-parallel rank of FSDP holds."""

from __future__ import annotations

from nemo_like.policy.fsdp.context_parallel import tokens_in_parts


def test_each_rank_has_a_piece_from_the_front_and_one_from_the_back_of_each_sample() -> None:
    assert tokens_in_parts((4,), 1).tolist() == [0, 1, 2, 3]
    rank_0, rank_1 = [0, 3, 4, 5, 10, 11], [1, 2, 6, 7, 8, 9]
    assert tokens_in_parts((4, 8), 2).tolist() == rank_0 + rank_1
