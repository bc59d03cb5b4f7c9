from __future__ import annotations

import numpy as np
import torch

from nemo_like.mismatch.substitution import Substitution, TensorPart, joined

GIVEN = {
    "norm": np.arange(6, dtype=np.float32).reshape(3, 2),
    "layers.0.self_attn.q_proj": np.arange(12, dtype=np.float32).reshape(3, 4),
}


def substitution(rank: int = 0, size: int = 1, *, divides_rows: bool = False) -> Substitution:
    return Substitution(GIVEN, TensorPart(rank, size, divides_rows), num_groups=1)


def test_values_are_kept_and_replaced_and_padding_stays() -> None:
    one = substitution()
    own = torch.full((1, 4, 2), 7.0)
    replaced = one("norm", own)
    assert replaced.tolist() == [[[0, 1], [2, 3], [4, 5], [7, 7]]]
    assert one.own["norm"].tolist() == [[7, 7]] * 3
    assert own.unique().tolist() == [7]  # of the trainer's tensor nothing is written


def test_a_point_that_the_engine_lacks_stays_as_it_is() -> None:
    own = torch.ones(1, 3, 2)
    assert substitution()("after_layers", own) is own


def test_values_that_only_are_looked_at_are_kept() -> None:
    one, own = substitution(), torch.ones(3, 2)
    assert one("norm", own, replaces=False) is own
    assert one.own["norm"].tolist() == [[1, 1]] * 3


def test_each_tensor_parallel_rank_gets_its_part_and_the_parts_join() -> None:
    ranks = {rank: substitution(rank, 2, divides_rows=True) for rank in (0, 1)}
    queries = [ranks[rank]("layers.0.self_attn.q_proj", torch.full((4, 1, 2), float(rank))) for rank in ranks]
    assert queries[1][:, 0].tolist() == [[2, 3], [6, 7], [10, 11], [1, 1]]
    # With sequences divided, a rank has two of the four rows, of which the last is padding.
    norms = [ranks[rank]("norm", torch.full((2, 1, 2), float(rank))) for rank in ranks]
    assert norms[1][:, 0].tolist() == [[4, 5], [1, 1]]
    whole = joined({rank: one.own for rank, one in ranks.items()}, divides_rows=True)
    assert whole["norm"].tolist() == [[0, 0], [0, 0], [1, 1]]
    assert whole["layers.0.self_attn.q_proj"].tolist() == [[0, 0, 1, 1]] * 3


def test_every_rank_has_all_log_probs() -> None:
    ranks = {rank: {"logprobs": np.ones((3, 1), np.float32)} for rank in (0, 1)}
    assert joined(ranks, divides_rows=True)["logprobs"].shape == (3, 1)
