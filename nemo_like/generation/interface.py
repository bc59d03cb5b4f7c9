"""Requests to and results from a generation engine; token ids in, token ids and log-probs out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class SamplingSettings:
    """How to sample; part of every request, so that training and validation share one path."""

    temperature: float  # 0 is greedy
    top_p: float
    top_k: int | None
    max_new_tokens: int
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupRequest:
    """One prompt and how many responses it wants. ``seeds[j]`` is response j's own."""

    request_id: str
    prompt_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Response:
    """token_ids: [L] int32, the stop token included; logprobs: [L] float32, nats."""

    token_ids: np.ndarray
    logprobs: np.ndarray
    is_truncated: bool  # ran into max_new_tokens


@dataclass(frozen=True, slots=True)
class GroupResult:
    request_id: str
    responses: tuple[Response, ...]  # in the order of the request's seeds
    policy_version: int  # of the weights that sampled all of them


OnGroups = Callable[[list[GroupResult]], None]


class GenerationEngine(Protocol):
    """One engine. Results arrive through ``on_groups``, each group when it is finished."""

    def submit(self, requests: Sequence[GroupRequest], sampling: SamplingSettings, on_groups: OnGroups) -> None:
        """Queue the requests and return at once."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Drop requests; their groups are never delivered."""
