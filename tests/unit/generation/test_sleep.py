from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.engine_spec import Sleeps
from nemo_like.generation.sleep import EngineMemory, has_sleep_mode
from nemo_like.policy.options import Device

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


@pytest.mark.parametrize(("sleeps", "level"), [(Sleeps.keeping_weights, 1), (Sleeps.losing_weights, 2)])
def test_a_step_wakes_weights_then_the_kv_cache_then_sleeps(sleeps: Sleeps, level: int) -> None:
    engine = Engine()
    memory = EngineMemory(engine, sleeps)
    for target in (NOTHING, WEIGHTS, WEIGHTS):
        memory.hold(target)
    memory.weights_came()
    for target in (EVERYTHING, EVERYTHING, NOTHING):
        memory.hold(target)
    assert engine.calls == [("sleep", level), ("wake", "weights"), ("wake", "kv_cache"), ("sleep", level)]


def test_an_engine_that_lost_its_weights_serves_nobody_before_others_came() -> None:
    engine = Engine()
    memory = EngineMemory(engine, Sleeps.losing_weights)
    memory.hold(NOTHING)
    with pytest.raises(RuntimeError, match="lost its weights while it slept, and no others have come"):
        memory.hold(EVERYTHING)
    memory.hold(WEIGHTS)
    with pytest.raises(RuntimeError, match="lost its weights"):
        memory.hold(EVERYTHING)
    memory.weights_came()
    memory.hold(EVERYTHING)
    assert engine.awake == {"weights", "kv_cache"}


def test_an_engine_with_a_device_of_its_own_never_sleeps() -> None:
    with pytest.raises(RuntimeError, match="it was not started to sleep: it has a device of its own"):
        EngineMemory(Engine(), Sleeps.never).hold(NOTHING)


@given(st.lists(st.sampled_from(list(EngineHolds))))
def test_it_holds_what_it_was_told_last_and_moves_only_then(targets: list[EngineHolds]) -> None:
    engine = Engine()
    memory = EngineMemory(engine, Sleeps.keeping_weights)
    for target in targets:
        memory.hold(target)
        told = len(engine.calls)
        memory.hold(target)
        assert len(engine.calls) == told
        assert len(engine.awake) == [NOTHING, WEIGHTS, EVERYTHING].index(target)
        assert memory.holds is target
        assert target is not WEIGHTS or engine.awake == {"weights"}


def test_an_engine_on_a_cpu_cannot_sleep() -> None:
    assert not has_sleep_mode("engine-0", Sleeps.never, Device.cpu)
    for sleeps in (Sleeps.keeping_weights, Sleeps.losing_weights):
        assert has_sleep_mode("engine-0", sleeps, Device.cuda)
        with pytest.raises(ValueError, match="'engine-0' cannot sleep with policy"):
            has_sleep_mode("engine-0", sleeps, Device.cpu)
