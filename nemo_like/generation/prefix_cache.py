"""Drops what a vLLM engine keeps of the weights that it had before."""

from __future__ import annotations

from typing import Protocol


class Caching(Protocol):
    """What is needed of vLLM's ``LLMEngine``."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...


def drop_keys_and_values(engine: Caching, *, under_way: bool) -> None:
    """Drop cached keys and values; with ``under_way`` those of samples under way too, which vLLM computes
    anew when these go on.

    Raises RuntimeError when vLLM keeps them, as it does while it counts a block of them as in use.
    """
    if not engine.reset_prefix_cache(reset_running_requests=under_way):
        raise RuntimeError(
            "vLLM keeps keys and values of the weights before, since a request still holds some; what is "
            "sampled next would be of two policy versions"
        )
