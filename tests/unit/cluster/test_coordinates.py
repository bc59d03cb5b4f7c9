from __future__ import annotations

import pytest

from nemo_like.cluster.coordinates import Coordinates, ParallelLayout


def test_tensor_ranks_are_neighbours_and_pipeline_stages_far_apart() -> None:
    layout = ParallelLayout(tp=2, cp=1, dp=2, pp=2)
    places = [(c.tp, c.dp, c.pp) for c in map(layout.coordinates, range(8))]
    assert places == [(0, 0, 0), (1, 0, 0), (0, 1, 0), (1, 1, 0), (0, 0, 1), (1, 0, 1), (0, 1, 1), (1, 1, 1)]


def test_there_is_one_leader_per_replica() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=3, pp=2)
    leaders = [c.dp for c in map(layout.coordinates, range(layout.world_size)) if c.is_leader]
    assert leaders == [0, 1, 2]


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(ValueError, match="rank=4 is outside the world of 4 workers"):
        ParallelLayout(tp=2, cp=1, dp=2, pp=1).coordinates(4)


def test_coordinates_cannot_be_made_without_every_axis() -> None:
    layout = ParallelLayout(tp=1, cp=1, dp=1, pp=1)
    with pytest.raises(TypeError, match="ep"):
        Coordinates(layout=layout, rank=0, tp=0, cp=0, dp=0, pp=0)


def test_consecutive_ranks_of_a_stage_share_the_experts() -> None:
    layout = ParallelLayout(tp=2, cp=1, dp=2, pp=2, ep=2)
    assert [layout.coordinates(rank).ep for rank in range(8)] == [0, 1] * 4
    wide = ParallelLayout(tp=1, cp=1, dp=3, pp=2, ep=3)
    assert [wide.coordinates(rank).ep for rank in range(6)] == [0, 1, 2] * 2


def test_the_ranks_that_share_an_expert_are_neighbours() -> None:
    layout = ParallelLayout(tp=2, cp=1, dp=4, pp=1, ep=2, etp=2)
    places = [layout.coordinates(rank) for rank in range(8)]
    assert [place.etp for place in places] == [0, 1] * 4
    assert [place.ep for place in places] == [0, 0, 1, 1] * 2
    with pytest.raises(ValueError, match="ep=2 x etp=2 must divide the tp x cp x dp = 2 ranks"):
        ParallelLayout(tp=2, cp=1, dp=1, pp=1, ep=2, etp=2)


def test_experts_must_divide_over_the_ranks_of_a_stage() -> None:
    with pytest.raises(ValueError, match="ep=4 x etp=1 must divide the tp x cp x dp = 6 ranks"):
        ParallelLayout(tp=2, cp=1, dp=3, pp=2, ep=4)
