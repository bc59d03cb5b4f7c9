from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.ordering import by_generation


def test_all_first_generations_come_first() -> None:
    assert by_generation(num_prompts=3, num_generations=2) == [0, 2, 4, 1, 3, 5]


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_sample_comes_exactly_once(num_prompts: int, num_generations: int) -> None:
    assert sorted(by_generation(num_prompts, num_generations)) == list(range(num_prompts * num_generations))
