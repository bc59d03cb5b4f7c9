"""Keys and values of older weights are dropped, or the engine is of no more use."""

from __future__ import annotations

import pytest

from nemo_like.generation.prefix_cache import drop_keys_and_values


class Engine:
    """Stands for vLLM's, whose scheduler says whether it could."""

    def __init__(self, can: bool) -> None:
        self._can = can
        self.asked: list[bool] = []

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.asked.append(reset_running_requests)
        return self._can


@pytest.mark.parametrize("under_way", [False, True])
def test_they_are_dropped_also_of_samples_under_way_where_that_is_asked(under_way: bool) -> None:
    engine = Engine(can=True)
    drop_keys_and_values(engine, under_way=under_way)
    assert engine.asked == [under_way]


def test_what_vllm_keeps_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="vLLM keeps keys and values of the weights before"):
        drop_keys_and_values(Engine(can=False), under_way=False)
