"""The HTTP server that agents call as they would call OpenAI or Anthropic, on the rollout's event loop.

    agent ── key of its session ──▶ /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
          ── a reward, if it reports one ──▶ /v1/reward

Without a key, or with that of a session that has ended, every call is refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.feedback import as_number
from nemo_like.rollout import agent_messages_api as messages_api
from nemo_like.rollout import agent_responses_api as responses_api
from nemo_like.rollout.agent_calls import AgentSession, Answered, CallAnswerer, assistant_message
from nemo_like.rollout.agent_chat_api import (
    MODEL,
    chat_answer,
    chat_events,
    completion_answer,
    completion_events,
    wanted_chat,
    wanted_completion,
)
from nemo_like.rollout.agent_prompts import BadRequest, plain_messages
from nemo_like.rollout.agent_tools import AgentTools

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 32 * 2**20
_BACKLOG = 4096


class AgentEndpoint:
    """Serves the sessions that ``sessions`` holds by key."""

    def __init__(
        self,
        sessions: Mapping[str, AgentSession],
        answerer: CallAnswerer,
        tools: AgentTools,
        tokenizer: Tokenizer,
    ) -> None:
        self._sessions, self._answerer, self._tools = sessions, answerer, tools
        self._tokenizer = tokenizer
        self._kept: dict[str, dict[str, list[dict[str, Any]]]] = {}  # messages of /v1/responses, by session
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    async def start(self, host: str) -> str:
        """Begin to serve at a free port of ``host``, and return the base URL. Raises OSError when no port can
        be bound."""
        listening = socket.create_server((host, 0), backlog=_BACKLOG)
        config = uvicorn.Config(
            self._app(), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=120
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _no_signals  # type: ignore[method-assign]
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        return f"http://{host}:{listening.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Stop serving."""
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def forget(self, session: AgentSession) -> None:
        """Drop what was kept for a session that has ended."""
        self._kept.pop(session.key, None)

    def _app(self) -> Starlette:
        posts: dict[str, Callable[[AgentSession, dict[str, Any]], Coroutine[Any, Any, Response]]] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/messages": self._message,
            "/v1/responses": self._response,
            "/v1/reward": self._reward,
            "/v1/session/restart": self._restart,
        }
        routes = [Route(path, self._served(path, serve), methods=["POST"]) for path, serve in posts.items()]
        # Anthropic's client adds /v1 itself: its base URL has none, or this one.
        routes.append(Route("/v1/v1/messages", self._served("/v1/messages", self._message), methods=["POST"]))
        return Starlette(routes=[*routes, Route("/v1/models", self._models)])

    def _served(
        self, path: str, serve: Callable[[AgentSession, dict[str, Any]], Coroutine[Any, Any, Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        is_anthropic = path == "/v1/messages"

        async def served(request: Request) -> Response:
            try:
                session = self._session(request)
                return await _unless_gone(request, serve(session, await _body(request)))
            except BadRequest as error:
                return _refused(error, is_anthropic=is_anthropic)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                _log.exception("a call of an agent to %s failed", path)
                failed = BadRequest(f"{type(error).__name__}: {error}", status=500, code="server_error")
                return _refused(failed, is_anthropic=is_anthropic)

        return served

    def _session(self, request: Request) -> AgentSession:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")
        session = self._sessions.get(key.strip())
        if session is None:
            raise BadRequest(
                "no session has this API key, or it has ended", status=401, code="invalid_api_key"
            )
        if not session.is_open:
            session.call_after_end()
            raise BadRequest("the session has ended", status=410, code="session_ended")
        return session

    async def _chat(self, session: AgentSession, body: dict[str, Any]) -> Response:
        answered = await self._complete(session, body)
        if body.get("stream"):
            return _stream(_data(chat_events(answered, body, self._tokenizer), end="[DONE]"))
        return JSONResponse(chat_answer(answered, body, self._tokenizer))

    async def _completion(self, session: AgentSession, body: dict[str, Any]) -> Response:
        tools = await self._tools.of_request(body, None)
        answered = await self._answerer.answer(session, wanted_completion(body, tools))
        if body.get("stream"):
            return _stream(_data(completion_events(answered, body, self._tokenizer), end="[DONE]"))
        return JSONResponse(completion_answer(answered, body, self._tokenizer))

    async def _message(self, session: AgentSession, body: dict[str, Any]) -> Response:
        answered = await self._complete(session, messages_api.as_chat(body))
        if body.get("stream"):
            return _stream(_named_events(messages_api.message_events(answered, body)))
        return JSONResponse(messages_api.message_answer(answered, body))

    async def _response(self, session: AgentSession, body: dict[str, Any]) -> Response:
        kept = self._kept.setdefault(session.key, {})
        chat = responses_api.as_chat(body, kept)
        answered = await self._complete(session, chat)
        (choice,) = answered.choices
        said = assistant_message(choice.parsed, choice.call_ids)
        kept[responses_api.response_id(answered)] = [*plain_messages(chat["messages"]), said]
        if body.get("stream"):
            return _stream(_named_events(responses_api.response_events(answered, body)))
        return JSONResponse(responses_api.response_answer(answered, body))

    async def _complete(self, session: AgentSession, chat: dict[str, Any]) -> Answered:
        tools = await self._tools.of_request(chat, session.tool_parser)
        return await self._answerer.answer(session, wanted_chat(chat, tools))

    async def _reward(self, session: AgentSession, body: dict[str, Any]) -> Response:
        """Take the session's reward, as a number or as named numbers; the latest counts."""
        given = body.get("reward")
        values = given if isinstance(given, dict) else {"reward": given}
        rewards = {str(name): as_number(value) for name, value in values.items() if value is not None}
        if not rewards or None in rewards.values():
            raise BadRequest(f"reward={given!r} must be a number, or named numbers, not all of them null")
        session.reward = {str(name): rewards.get(str(name)) for name in values}
        return JSONResponse({"ok": True})

    async def _restart(self, session: AgentSession, body: dict[str, Any]) -> Response:
        """Forget what a session's agent did; an agent itself cannot have that."""
        if body.get("restart_key") != session.restart_key:
            raise BadRequest("only who runs an agent begins its session again", status=403, code="forbidden")
        session.begin_again()
        self._kept.pop(session.key, None)
        return JSONResponse({"ok": True})

    async def _models(self, request: Request) -> Response:
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "nemo_like"}
        return JSONResponse({"object": "list", "data": [model]})


async def _unless_gone(request: Request, serving: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer to a request that was read whole, or cancel ``serving`` when the client goes away.

    Clients ask anew after a timeout of their own. What nobody waits for any more is not sampled to its end,
    and is no call of the session.
    """
    answer = asyncio.create_task(serving)
    departure = asyncio.ensure_future(request.receive())  # nothing else is left to receive
    try:
        await asyncio.wait({answer, departure}, return_when=asyncio.FIRST_COMPLETED)
        if answer.done():
            return answer.result()
        raise BadRequest("the client has disconnected", status=499, code="disconnected")
    finally:
        answer.cancel()
        departure.cancel()


async def _body(request: Request) -> dict[str, Any]:
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
        raise BadRequest(f"a request may have {_MAX_BODY_BYTES} bytes", status=413, code="too_large")
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > _MAX_BODY_BYTES:
            raise BadRequest(f"a request may have {_MAX_BODY_BYTES} bytes", status=413, code="too_large")
    try:
        body = json.loads(bytes(content) or b"{}")
    except ValueError as error:
        raise BadRequest(f"the body is no JSON: {error}") from error
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _refused(error: BadRequest, *, is_anthropic: bool) -> Response:
    message = str(error)
    if is_anthropic:
        content: dict[str, Any] = {"type": "error", "error": {"type": error.code, "message": message}}
    else:
        content = {"error": {"message": message, "type": error.code, "code": error.code, "param": None}}
    # Clients ask again after some refusals; asking again would change none of these.
    return JSONResponse(content, status_code=error.status, headers={"x-should-retry": "false"})


def _stream(lines: Iterable[str]) -> Response:
    return StreamingResponse(_sent(lines), media_type="text/event-stream")


async def _sent(lines: Iterable[str]) -> Any:
    for line in lines:
        yield line


def _data(events: Iterable[Mapping[str, Any]], *, end: str) -> Iterator[str]:
    yield from (f"data: {json.dumps(event)}\n\n" for event in events)
    yield f"data: {end}\n\n"


def _named_events(events: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def _no_signals() -> Any:
    """Leave signals to the process that hosts the server."""
    return nullcontext()
