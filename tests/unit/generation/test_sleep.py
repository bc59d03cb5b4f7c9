from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.config.gpu_stages import EngineHolds
from nemo_like.config.schema import Device
from nemo_like.generation.sleep import EngineMemory, Sleeps, has_sleep_mode

NOTHING, WEIGHTS, EVERYTHING = EngineHolds.nothing, EngineHolds.weights, EngineHolds.everything


class Engine:
    """Records what it is told, and what is awake; as vLLM, it wakes only what sleeps."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.awake = {"weights", "kv_cache"}

    def sleep(self, level: int) -> None:
        assert self.awake == {"weights", "kv_cache"}
        self.calls.append(("sleep", level))
        self.awake = set()

    def wake_up(self, tags: list[str]) -> None:
        assert not self.awake & set(tags)
        self.calls.append(("wake", *tags))
        self.awake |= set(tags)


def test_a_step_wakes_weights_then_the_kv_cache_then_sleeps() -> None:
    engine = Engine()
    memory = EngineMemory(engine)
    for target in (NOTHING, WEIGHTS, WEIGHTS, EVERYTHING, EVERYTHING, NOTHING):
        memory.hold(target)
    assert engine.calls == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache"), ("sleep", 1)]


@given(st.lists(st.sampled_from(list(EngineHolds))))
def test_it_holds_what_it_was_told_last_and_moves_only_then(targets: list[EngineHolds]) -> None:
    engine = Engine()
    memory = EngineMemory(engine)
    for target in targets:
        memory.hold(target)
        told = len(engine.calls)
        memory.hold(target)
        assert len(engine.calls) == told
        assert len(engine.awake) == [NOTHING, WEIGHTS, EVERYTHING].index(target)
        assert memory.holds is target
        assert target is not WEIGHTS or engine.awake == {"weights"}


def test_an_engine_on_a_cpu_cannot_sleep() -> None:
    assert has_sleep_mode("engine-0", Sleeps.while_training, Device.cuda)
    assert not has_sleep_mode("engine-0", Sleeps.never, Device.cpu)
    with pytest.raises(ValueError, match="'engine-0' cannot sleep with policy"):
        has_sleep_mode("engine-0", Sleeps.while_training, Device.cpu)
