"""Drops the keys and values that a vLLM engine has cached with earlier weights."""

from __future__ import annotations

from typing import Protocol


class Caching(Protocol):
    """The part of vLLM's ``LLMEngine`` that ``drop_keys_and_values`` needs."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool: ...


def drop_keys_and_values(engine: Caching, *, under_way: bool) -> None:
    """Drop cached keys and values. With ``under_way``, drop also those of samples under way, which vLLM
    computes anew when the samples go on.

    Raises RuntimeError when vLLM keeps them, as it does while it counts one of their blocks as in use.
    """
    if not engine.reset_prefix_cache(reset_running_requests=under_way):
        raise RuntimeError(
            "vLLM keeps keys and values of the weights before, since a request still holds some; what is "
            "sampled next would be of two policy versions"
        )
