"""Rewards from an HTTP server.

    POST url   {"turns": [{"prompt": ..., "response": ..., "answer": ..., "is_truncated": ..., "data": ...,
                           "history": [{"response": ..., "observation": ...}], "is_last": ..., "state": ...}]}
    200        {"feedback": [{"rewards": {"name": 1.0}, ...}]}, one per turn, in order

An entry of ``feedback`` may have the fields of ``Feedback``: ``rewards``, ``observation``, ``images``,
``is_done``, ``metrics``, ``state``; or ``failure``, the reason why this sample has no reward. A number alone
is the reward. An entry with neither rewards nor an observation fails its sample.
"""

from __future__ import annotations

import asyncio
import json
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

from nemo_like.data.messages import as_record
from nemo_like.environments.feedback import Malformed, as_number
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.kinds.http import HttpOptions

_ENTRY = ("rewards", "observation", "images", "is_done", "metrics", "state", "failure")
_MAX_SHOWN_CHARACTERS = 300  # of a request and of an answer
_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


class HttpEnvironment:
    """Asks an HTTP server, in one request per call.

    When the server does not answer all turns of a call, all of them fail.
    """

    def __init__(self, options: HttpOptions) -> None:
        self._options = options
        self._slots = asyncio.Semaphore(options.max_parallel)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order.

        Raises ValueError or TypeError for turns that cannot be written as JSON.
        """
        if not turns:
            return []
        content = json.dumps({"turns": [_as_json(turn) for turn in turns]}, allow_nan=False)
        try:
            async with self._slots, httpx.AsyncClient(timeout=self._options.request_timeout_s) as client:
                response = await self._post(client, content)
        except httpx.HTTPError as error:
            reason = self._reason(f"{type(error).__name__}: {error}", content)
            return [Feedback.failed(FailureKind.unreachable, reason)] * len(turns)
        came_back = f"status {response.status_code}: {_shortened(response.text)}"
        if not response.is_success:
            reason = self._reason(came_back, content)
            return [Feedback.failed(FailureKind.unreachable, reason)] * len(turns)
        try:
            return [_feedback(answer) for answer in _entries(response, len(turns))]
        except Malformed as error:
            reason = self._reason(f"{error}; {came_back}", content)
            return [Feedback.failed(FailureKind.malformed, reason)] * len(turns)

    def _reason(self, came_back: str, sent: str) -> str:
        return f"POST {self._options.url} gave {came_back}; sent was {_shortened(sent)}"

    async def _post(self, client: httpx.AsyncClient, content: str) -> httpx.Response:
        """Post until the answer is no temporary error, ``max_attempts`` times at most.

        Return the last answer. Raises httpx.TransportError when the last attempt got none.
        """
        attempts = AsyncRetrying(
            retry=retry_if_exception_type(httpx.TransportError) | retry_if_result(_is_temporary),
            stop=stop_after_attempt(self._options.max_attempts),
            wait=wait_exponential(multiplier=self._options.retry_pause_s),
            retry_error_callback=_last_outcome,
        )
        headers = {"Content-Type": "application/json"}
        return await attempts(client.post, self._options.url, content=content, headers=headers)


def _last_outcome(state: RetryCallState) -> httpx.Response:
    assert state.outcome is not None
    return cast(httpx.Response, state.outcome.result())


def _is_temporary(response: httpx.Response) -> bool:
    return response.status_code == _TOO_MANY_REQUESTS or response.status_code >= _FIRST_SERVER_ERROR


def _as_json(turn: Turn) -> dict[str, Any]:
    return {
        "prompt": as_record(turn.prompt),
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


def _entries(response: httpx.Response, count: int) -> list[Any]:
    """Return the server's entries, one per turn. Raises Malformed for any other answer."""
    try:
        answer = response.json()
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the answer is no JSON ({error})") from None
    entries = answer.get("feedback") if isinstance(answer, Mapping) else None
    if not isinstance(entries, list):
        raise Malformed('the answer is not {"feedback": [...]}')
    if len(entries) != count:
        raise Malformed(f"the answer has {len(entries)} entries for {count} turns")
    return entries


def _feedback(entry: Any) -> Feedback:
    """Return an entry as feedback whose values are not checked yet; a failed one when it has no reward and no
    observation.

    Unknown keys are ignored.
    """
    if entry is None:
        return Feedback({"reward": None})
    if (number := as_number(entry)) is not None:
        return Feedback({"reward": number})
    known = {key: entry[key] for key in _ENTRY if key in entry} if isinstance(entry, Mapping) else {}
    if known.get("failure") is not None:
        return Feedback.failed(FailureKind.raised, str(known["failure"]))
    if not known.keys() & {"rewards", "observation"}:
        said = _shortened(json.dumps(entry))
        reason = f"the server's entry {said} is no number, and has neither rewards nor observation"
        return Feedback.failed(FailureKind.malformed, reason)
    return Feedback(**known)


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARACTERS else text[:_MAX_SHOWN_CHARACTERS] + "..."
