"""How an engine gives up its GPU's memory while the policy uses the GPU, and gets it back.

    everything ──sleep──▶ nothing ──wake──▶ weights ──wake──▶ everything

What the KV cache holds is lost. The weights are lost too (vLLM's sleep of level 2) where a transfer brings
all of them before anything is generated again; elsewhere they wait in host memory (level 1).
``cluster.stage`` says what an engine holds in which stage of a run.
"""

from __future__ import annotations

from typing import Any, Protocol

from nemo_like.cluster.stage import EngineHolds
from nemo_like.generation.engine_spec import Sleeps
from nemo_like.policy.options import Device

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # vLLM's names
_TAGS = {
    EngineHolds.nothing: (),
    EngineHolds.weights: (_WEIGHTS,),
    EngineHolds.everything: (_WEIGHTS, _KV_CACHE),
}


_LEVELS = {Sleeps.keeping_weights: 1, Sleeps.losing_weights: 2}  # vLLM's


def has_sleep_mode(engine: str, sleeps: Sleeps, device: Device) -> bool:
    """Return whether vLLM must allocate its memory so that it can give it up.

    Raises ValueError for an engine that should sleep on a CPU, where vLLM's sleep does nothing.
    """
    if sleeps is not Sleeps.never and device is Device.cpu:
        raise ValueError(
            f"engine {engine!r} cannot sleep with policy.device=cpu: vLLM gives up the memory of GPUs only"
        )
    return sleeps is not Sleeps.never


class Sleeper(Protocol):
    """The part of vLLM's ``LLMEngine`` that is used here."""

    def sleep(self, level: int) -> Any: ...

    def wake_up(self, tags: list[str]) -> Any: ...


class EngineMemory:
    """Moves one engine between what it may hold. The engine starts with everything."""

    def __init__(self, engine: Sleeper, sleeps: Sleeps) -> None:
        self._engine, self._sleeps = engine, sleeps
        self.holds = EngineHolds.everything
        self._has_weights = True

    def weights_came(self) -> None:
        """Take note that the engine has got all weights."""
        self._has_weights = True

    def hold(self, target: EngineHolds) -> None:
        """Have the engine hold exactly this from now on; does nothing where it does already.

        Raises RuntimeError for an engine that never sleeps, and when one that lost its weights should hold
        everything before others came.
        """
        if self._sleeps is Sleeps.never:
            raise RuntimeError("it was not started to sleep: it has a device of its own")
        if target is EngineHolds.everything and not self._has_weights:
            raise RuntimeError("it lost its weights while it slept, and no others have come")
        has, wanted = _TAGS[self.holds], _TAGS[target]
        if len(wanted) < len(has):
            # vLLM puts everything to sleep at once, so nothing may be asleep already.
            self._wake(has, _TAGS[EngineHolds.everything])
            self._engine.sleep(level=_LEVELS[self._sleeps])
            self._has_weights = self._sleeps is Sleeps.keeping_weights
            has = ()
        self._wake(has, wanted)
        self.holds = target

    def _wake(self, has: tuple[str, ...], wanted: tuple[str, ...]) -> None:
        for tag in wanted[len(has) :]:
            self._engine.wake_up(tags=[tag])
