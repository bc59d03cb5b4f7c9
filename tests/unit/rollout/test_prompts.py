from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.rollout.prompts import RolloutMode, WantedGroups, newest_under_way, response_seeds, turn_seed

TRAINING, VALIDATION = RolloutMode.training, RolloutMode.validation


def test_rollouts_run_ahead_up_to_the_next_step_after_which_nothing_may_be_under_way() -> None:
    def saves(step: int) -> bool:
        return step % 4 == 0

    assert [newest_under_way(step, 2, saves) for step in range(1, 7)] == [3, 4, 4, 4, 7, 8]
    assert newest_under_way(4, 0, saves) == 4


def test_a_part_waits_for_so_many_groups_besides_those_before_or_for_all_that_are_left() -> None:
    assert [WantedGroups(2).num_ended(taken, 5) for taken in (0, 3, 4)] == [2, 5, 5]


@given(st.integers(0, 2**31), st.integers(0, 10**6), st.integers(0, 10**5), st.integers(1, 64))
def test_seeds_are_consecutive_and_fit_a_signed_64_bit_integer(
    seed: int, step: int, position: int, count: int
) -> None:
    seeds = response_seeds(seed, TRAINING, step, position, count)
    assert seeds == tuple(range(seeds[0], seeds[0] + count))
    assert seeds[0] >= 0
    assert seeds[-1] < 2**63


def test_no_two_responses_of_many_steps_share_a_seed() -> None:
    seeds = [
        s
        for step in range(20)
        for position in range(128)
        for s in response_seeds(1, TRAINING, step, position, 8)
    ]
    assert len(set(seeds)) == len(seeds)


def test_the_responses_of_a_step_differ_in_the_bits_that_generators_on_cpus_take() -> None:
    one, other = torch.Generator().manual_seed(5), torch.Generator().manual_seed(5 + 2**32)
    assert torch.equal(torch.rand(8, generator=one), torch.rand(8, generator=other))
    for step in range(20):
        seeds = [s % 2**32 for group in range(128) for s in response_seeds(1, TRAINING, step, group, 8)]
        assert len(set(seeds)) == len(seeds)


def test_every_part_of_the_place_changes_the_seed() -> None:
    places = [
        (1, TRAINING, 1, 1),
        (2, TRAINING, 1, 1),
        (1, VALIDATION, 1, 1),
        (1, TRAINING, 2, 1),
        (1, TRAINING, 1, 2),
    ]
    assert len({response_seeds(*place, 8)[0] for place in places}) == len(places)


def test_every_turn_of_every_sample_has_a_seed_of_its_own() -> None:
    seeds = [turn_seed(first, turn) for first in range(100) for turn in range(1, 10)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**62 for seed in seeds)
