"""``SamplingSettings``: how responses are sampled."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How the responses of one task are sampled; part of every request to an engine."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int  # 0: all tokens
    max_new_tokens: int  # per turn
    # A response ends with one of these, which is no part of its text. At first they are the configuration's;
    # a rollout adds the checkpoint's.
    stop_token_ids: tuple[int, ...] = ()
    min_p: float = 0.0
    stop_strings: tuple[str, ...] = ()  # a response also ends with one of these, which stays in it
    # JSON of vLLM's StructuredOutputsParams, such as {"json": {"type": "object"}}: a mask of allowed tokens.
    # The response's log-probs are those without this mask, and it has the column forced.
    structured_outputs: str | None = None
