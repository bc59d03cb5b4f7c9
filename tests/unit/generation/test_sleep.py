from __future__ import annotations

from typing import Any

import pytest

from nemo_like.config.schema import Device
from nemo_like.generation.sleep import EngineMemory, Sleeps, has_sleep_mode


class Engine:
    """Records what it is told."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def sleep(self, level: int) -> None:
        self.calls.append(("sleep", level))

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))


def test_weights_wake_before_the_kv_cache_and_each_once() -> None:
    engine = Engine()
    memory = EngineMemory(engine)
    memory.sleep()
    memory.wake_weights()
    memory.wake_weights()
    memory.wake()
    memory.wake()
    assert engine.calls == [("sleep", 1), ("wake", "weights"), ("wake", "kv_cache")]


def test_an_engine_that_is_awake_is_not_woken_and_one_asleep_stays_so() -> None:
    engine = Engine()
    memory = EngineMemory(engine)
    memory.wake()
    assert engine.calls == []
    memory.sleep()
    memory.sleep()
    assert engine.calls == [("sleep", 1)]


def test_an_engine_that_is_half_awake_wakes_wholly_before_it_sleeps_again() -> None:
    engine = Engine()
    memory = EngineMemory(engine)
    memory.sleep()
    memory.wake_weights()
    memory.sleep()
    assert engine.calls[-2:] == [("wake", "kv_cache"), ("sleep", 1)]


def test_an_engine_on_a_cpu_cannot_sleep() -> None:
    assert has_sleep_mode("engine-0", Sleeps.while_training, Device.cuda)
    assert not has_sleep_mode("engine-0", Sleeps.never, Device.cpu)
    with pytest.raises(ValueError, match="'engine-0' cannot sleep with policy"):
        has_sleep_mode("engine-0", Sleeps.while_training, Device.cpu)
