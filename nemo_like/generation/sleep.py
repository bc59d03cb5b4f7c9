"""How an engine gives up its GPU's memory while the policy uses the GPU, and gets it back.

    awake ──sleep──▶ asleep ──wake_weights──▶ weights awake ──wake──▶ awake

This is vLLM's sleep of level 1: the weights wait in host memory, so that the version in force survives, and
what the KV cache holds is lost. The weights wake first, to be overwritten while the trainer still holds what
it sends. The KV cache wakes when there is something to generate.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, Protocol

from nemo_like.config.schema import Device

_WEIGHTS, _KV_CACHE = "weights", "kv_cache"  # vLLM's names
_KEEP_WEIGHTS_ON_HOST = 1


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
    """Puts one engine's memory to sleep and wakes it, part by part. The engine starts awake."""

    def __init__(self, engine: Sleeper) -> None:
        self._engine = engine
        self._asleep: set[str] = set()

    def sleep(self) -> None:
        """Give up weights and KV cache. Does nothing when both are asleep already."""
        if self._asleep == {_WEIGHTS, _KV_CACHE}:
            return
        self.wake()  # vLLM puts everything to sleep at once, so nothing may be asleep already
        self._engine.sleep(level=_KEEP_WEIGHTS_ON_HOST)
        self._asleep = {_WEIGHTS, _KV_CACHE}

    def wake_weights(self) -> None:
        self._wake(_WEIGHTS)

    def wake(self) -> None:
        """Wake what is asleep of weights and KV cache, since generation needs both."""
        self._wake(_WEIGHTS)
        self._wake(_KV_CACHE)

    def _wake(self, part: str) -> None:
        if part in self._asleep:
            self._engine.wake_up(tags=[part])
            self._asleep.remove(part)
