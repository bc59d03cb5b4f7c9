"""Rewards from an HTTP server.

    POST url   {"turns": [{"prompt": ..., "response": ..., "answer": ..., "is_truncated": ..., "data": ...,
                           "history": [{"response": ..., "observation": ...}], "is_last": ..., "state": ...}]}
    200        {"feedback": [{"rewards": {"name": 1.0}, ...}]}, one per turn, in order

An entry of ``feedback`` may have what ``Feedback`` has: ``rewards``, ``observation``, ``is_done``,
``metrics``, ``state``; or ``failure``, the reason why this sample has no reward. A number alone is the
reward.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, cast

import httpx
from tenacity import (
    AsyncRetrying,
    RetryCallState,
    retry_if_exception_type,
    retry_if_result,
    stop_after_attempt,
    wait_exponential,
)

from nemo_like.config.environment_options import HttpOptions
from nemo_like.environments.interface import FailureKind, Feedback, Turn

_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


class HttpEnvironment:
    """One request per call. Without a sensible answer every turn of the call fails as unreachable."""

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.max_parallel)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        if not turns:
            return []
        try:
            async with self._slots, httpx.AsyncClient(timeout=self._options.request_timeout_s) as client:
                response = await self._post(client, {"turns": [_as_json(turn) for turn in turns]})
            response.raise_for_status()
            answers = response.json()["feedback"]
            if len(answers) != len(turns):
                raise ValueError(f"{len(answers)} answers to {len(turns)} turns")
            return [_feedback(answer) for answer in answers]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            reason = f"{self._options.url}: {type(error).__name__}: {error}"
            return [Feedback.failed(FailureKind.unreachable, reason)] * len(turns)

    async def _post(self, client: httpx.AsyncClient, content: Mapping[str, Any]) -> httpx.Response:
        """The first answer that is not worth another attempt, or the last; raises httpx.TransportError."""
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(_is_temporary),
            stop=stop_after_attempt(self._options.max_attempts),
            wait=wait_exponential(multiplier=self._options.retry_pause_s),
            retry_error_callback=_last_outcome,
        )
        return await attempts(client.post, self._options.url, json=content)


def _last_outcome(state: RetryCallState) -> httpx.Response:
    assert state.outcome is not None
    return cast(httpx.Response, state.outcome.result())


def _is_temporary(response: httpx.Response) -> bool:
    return response.status_code == _TOO_MANY_REQUESTS or response.status_code >= _FIRST_SERVER_ERROR


def _as_json(turn: Turn) -> dict[str, Any]:
    prompt = turn.prompt
    return {
        "prompt": prompt
        if isinstance(prompt, str)
        else [{"role": message.role, "content": message.content} for message in prompt],
        "response": turn.response,
        "answer": turn.answer,
        "is_truncated": turn.is_truncated,
        "data": dict(turn.data),
        "history": [
            {"response": exchange.response, "observation": exchange.observation} for exchange in turn.history
        ],
        "is_last": turn.is_last,
        "state": turn.state,
    }


def _feedback(answer: Any) -> Feedback:
    """Raises ValueError, KeyError or TypeError when it is no feedback."""
    if isinstance(answer, int | float):
        return Feedback({"reward": float(answer)})
    if answer.get("failure") is not None:
        return Feedback.failed(FailureKind.raised, str(answer["failure"]))
    return Feedback(
        rewards={str(name): float(value) for name, value in answer.get("rewards", {}).items()},
        observation=answer.get("observation"),
        is_done=bool(answer.get("is_done", True)),
        metrics={str(name): float(value) for name, value in answer.get("metrics", {}).items()},
        state=answer.get("state"),
    )
