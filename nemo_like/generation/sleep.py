"""How an engine gives up its GPU's memory while the policy uses the GPU, and gets it back.

    everything ──sleep──▶ nothing ──wake──▶ weights ──wake──▶ everything

This is vLLM's sleep of level 1: the weights wait in host memory, so that the version in force survives, and
what the KV cache holds is lost. ``config.gpu_stages`` says what an engine holds in which stage of a run.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from nemo_like.config.gpu_stages import EngineHolds
from nemo_like.config.schema import Device

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # vLLM's names
_KEEP_WEIGHTS_ON_HOST = 1
_TAGS = {
    EngineHolds.nothing: (),
    EngineHolds.weights: (_WEIGHTS,),
    EngineHolds.everything: (_WEIGHTS, _KV_CACHE),
}


class Sleeps(Enum):
    """When an engine gives its device's memory to the policy."""

    never = "never"
    while_training = "while_training"


def has_sleep_mode(engine: str, sleeps: Sleeps, device: Device) -> bool:
    """Return whether vLLM must allocate its memory so that it can give it up.

    Raises ValueError for an engine that should sleep on a CPU, where vLLM's sleep does nothing.
    """
    if sleeps is Sleeps.while_training and device is Device.cpu:
        raise ValueError(
            f"engine {engine!r} cannot sleep with policy.device=cpu: vLLM gives up the memory of GPUs only"
        )
    return sleeps is Sleeps.while_training


class Sleeper(Protocol):
    """The part of vLLM's ``LLMEngine`` that is used here."""

    def sleep(self, level: int) -> Any: ...

    def wake_up(self, tags: list[str]) -> Any: ...


class EngineMemory:
    """Moves one engine between what it may hold. The engine starts with everything."""

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self.holds = EngineHolds.everything

    def hold(self, target: EngineHolds) -> None:
        """Have the engine hold exactly this from now on; does nothing where it does already."""
        has, wanted = _TAGS[self.holds], _TAGS[target]
        if len(wanted) < len(has):
            # vLLM puts everything to sleep at once, so nothing may be asleep already.
            self._wake(has, _TAGS[EngineHolds.everything])
            self._engine.sleep(level=_KEEP_WEIGHTS_ON_HOST)
            has = ()
        self._wake(has, wanted)
        self.holds = target

    def _wake(self, has: tuple[str, ...], wanted: tuple[str, ...]) -> None:
        for tag in wanted[len(has) :]:
            self._engine.wake_up(tags=[tag])
