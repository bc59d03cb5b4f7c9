"""How an engine gives up its GPU's memory while the policy uses the GPU, and gets it back.

    everything ──sleep──▶ nothing ──wake──▶ weights ──wake──▶ everything

The contents of the KV cache are lost. Where a transfer brings all weights before the engine generates again,
the weights are lost too (vLLM's sleep of level 2); elsewhere they are kept in host memory (level 1).
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
    """Return whether vLLM must allocate memory that it can give up.

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
    """Changes which part of its memory one engine holds. The engine starts with everything."""

    def __init__(self, engine: Sleeper, sleeps: Sleeps) -> None:
        self._engine, self._sleeps = engine, sleeps
        self.holds = EngineHolds.everything
        self._has_weights = True

    def weights_came(self) -> None:
        """Record that a transfer has brought all weights."""
        self._has_weights = True

    def hold(self, target: EngineHolds) -> None:
        """Make the engine hold exactly ``target`` from now on; do nothing where it does already.

        Raises RuntimeError for an engine that never sleeps, and when an engine that lost its weights should
        hold everything before a transfer brought new weights.
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
