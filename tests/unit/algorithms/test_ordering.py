from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.ordering import by_generation


def test_all_first_generations_come_first() -> None:
    assert by_generation(num_prompts=3, num_generations=2) == [0, 2, 4, 1, 3, 5]


def test_neighbours_of_a_prompt_stay_together() -> None:
    assert by_generation(num_prompts=2, num_generations=5, kept_together=2) == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 25))
def test_every_sample_comes_exactly_once(num_prompts: int, num_generations: int, kept_together: int) -> None:
    order = by_generation(num_prompts, num_generations, kept_together)
    assert sorted(order) == list(range(num_prompts * num_generations))
