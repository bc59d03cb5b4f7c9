"""The HTTP server that agents call as they would call OpenAI or Anthropic, on the rollout's event loop.

    agent ── key of its session ──▶ /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages
          ── a reward, if it reports one ──▶ /v1/reward

A call without a session's key, or with the key of a session that has ended, is refused. Reading a request and
writing its answer run in threads beside the loop (agent_work.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import reprlib
import socket
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.feedback import as_number
from nemo_like.rollout.agents import agent_messages_api as messages_api
from nemo_like.rollout.agents import agent_responses_api as responses_api
from nemo_like.rollout.agents.agent_calls import (
    AgentSession,
    CallAnswer,
    CallAnswerer,
    CallRequest,
    assistant_message,
)
from nemo_like.rollout.agents.agent_chat_api import (
    MODEL,
    chat_answer,
    chat_events,
    completion_answer,
    completion_events,
    read_chat_request,
    read_completion_request,
)
from nemo_like.rollout.agents.agent_connections import SilenceWatch
from nemo_like.rollout.agents.agent_request import BadRequest, read_body, refusal
from nemo_like.rollout.agents.agent_tools import AgentTools
from nemo_like.rollout.agents.agent_work import RequestWork

_log = logging.getLogger(__name__)
_MAX_BODY_BYTES = 32 * 2**20
_BACKLOG = 4096
_KEEP_ALIVE_S = 120
_MAX_SILENCE_S = 60.0  # of a client that has begun to send a request


@dataclass(frozen=True, slots=True)
class Body:
    """The JSON object of a request's body, and how many bytes the body has."""

    fields: dict[str, Any]
    num_bytes: int


Serve = Callable[[AgentSession, Body], Coroutine[Any, Any, Response]]


class AgentEndpoint:
    """Serves the calls of the sessions in ``sessions``, which maps keys to sessions."""

    def __init__(
        self,
        sessions: Mapping[str, AgentSession],
        answerer: CallAnswerer,
        tools: AgentTools,
        tokenizer: Tokenizer,
        work: RequestWork,
    ) -> None:
        self._sessions, self._answerer, self._tools = sessions, answerer, tools
        self._tokenizer, self._work = tokenizer, work
        self._kept: dict[str, dict[str, list[dict[str, Any]]]] = {}  # messages of /v1/responses, by session
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None
        self._watch: SilenceWatch | None = None

    async def start(self, host: str) -> str:
        """Begin to serve at a free port of ``host``, and return the base URL. Raises OSError when no port can
        be bound."""
        listening = socket.create_server((host, 0), backlog=_BACKLOG)
        config = uvicorn.Config(
            self._app(),
            log_config=None,
            access_log=False,
            lifespan="off",
            ws="none",
            timeout_keep_alive=_KEEP_ALIVE_S,
        )
        self._server = uvicorn.Server(config)
        self._server.capture_signals = _no_signals  # type: ignore[method-assign]
        self._serving = asyncio.get_running_loop().create_task(self._server.serve(sockets=[listening]))
        self._watch = SilenceWatch(self._server, _KEEP_ALIVE_S)
        return f"http://{host}:{listening.getsockname()[1]}/v1"

    async def close(self) -> None:
        """Stop serving."""
        if self._watch is not None:
            self._watch.stop()
        if self._server is not None and self._serving is not None:
            self._server.should_exit = self._server.force_exit = True
            await self._serving

    def forget(self, session: AgentSession) -> None:
        """Drop the messages that were kept for a session that has ended."""
        self._kept.pop(session.key, None)

    def _app(self) -> Starlette:
        posts: dict[str, Serve] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/messages": self._message,
            "/v1/messages/count_tokens": self._count_tokens,
            "/v1/responses": self._response,
            "/v1/reward": self._reward,
            "/v1/session/restart": self._restart,
        }
        routes = []
        for path, serve in posts.items():
            served = self._served(path, serve)
            routes.append(Route(path, served, methods=["POST"]))
            if path.startswith("/v1/messages"):
                # Anthropic's client adds /v1 itself: its base URL has none, or this one.
                routes.append(Route(f"/v1{path}", served, methods=["POST"]))
        models = [Route("/v1/models", self._models), Route("/v1/models/{name:path}", self._model)]
        return Starlette(routes=[*routes, *models])

    def _served(self, path: str, serve: Serve) -> Callable[[Request], Awaitable[Response]]:
        async def served(request: Request) -> Response:
            try:
                session = self._session(request)
                content = await _content(request)
                body = Body(await self._work.run(len(content), read_body, content), len(content))
                return await _unless_gone(request, serve(session, body))
            except BadRequest as error:
                return _refused(error, path)
            except asyncio.CancelledError:
                raise
            except Exception as error:
                _log.exception("a call of an agent to %s failed", path)
                failed = BadRequest(f"{type(error).__name__}: {error}", status=500, code="server_error")
                return _refused(failed, path)

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

    async def _chat(self, session: AgentSession, body: Body) -> Response:
        answered = await self._answerer.answer(session, await self._read_chat(session, body.fields, body))
        arguments = answered, body.fields, self._tokenizer
        whole, events = partial(chat_answer, *arguments), partial(chat_events, *arguments)
        return await self._answer(body, answered, whole, events, _data)

    async def _completion(self, session: AgentSession, body: Body) -> Response:
        await self._tools.prepare(body.fields)

        def read() -> CallRequest:
            return read_completion_request(body.fields, self._tools.of_request(body.fields, None))

        answered = await self._answerer.answer(session, await self._read(body, read))
        arguments = answered, body.fields, self._tokenizer
        whole, events = partial(completion_answer, *arguments), partial(completion_events, *arguments)
        return await self._answer(body, answered, whole, events, _data)

    async def _message(self, session: AgentSession, body: Body) -> Response:
        chat = await self._work.run(body.num_bytes, messages_api.as_chat, body.fields)
        answered = await self._answerer.answer(session, await self._read_chat(session, chat, body))
        whole = partial(messages_api.message_answer, answered, body.fields)
        events = partial(messages_api.message_events, answered, body.fields)
        return await self._answer(body, answered, whole, events, _named_events)

    async def _count_tokens(self, session: AgentSession, body: Body) -> Response:
        chat = await self._work.run(body.num_bytes, messages_api.as_chat, body.fields)
        wanted = await self._read_chat(session, chat, body)
        return JSONResponse({"input_tokens": await self._answerer.count_tokens(session, wanted)})

    async def _response(self, session: AgentSession, body: Body) -> Response:
        kept = self._kept.setdefault(session.key, {})
        chat = await self._work.run(body.num_bytes, responses_api.as_chat, body.fields, {**kept})
        wanted = await self._read_chat(session, chat, body)
        answered = await self._answerer.answer(session, wanted)
        (choice,) = answered.choices
        said = assistant_message(choice.parsed, choice.call_ids)
        kept[responses_api.response_id(answered)] = [*(wanted.messages or ()), said]
        whole = partial(responses_api.response_answer, answered, body.fields)
        events = partial(responses_api.response_events, answered, body.fields)
        return await self._answer(body, answered, whole, events, _named_events)

    async def _read_chat(self, session: AgentSession, chat: dict[str, Any], body: Body) -> CallRequest:
        """Read a chat completion that was made from a request of any API; ``body`` is the original
        request."""
        await self._tools.prepare(chat)

        def read() -> CallRequest:
            return read_chat_request(chat, self._tools.of_request(chat, session.tool_parser))

        return await self._read(body, read)

    async def _read(self, body: Body, read: Callable[[], CallRequest]) -> CallRequest:
        return replace(await self._work.run(body.num_bytes, read), num_bytes=body.num_bytes)

    async def _answer(
        self,
        body: Body,
        answered: CallAnswer,
        whole: Callable[[], Mapping[str, Any]],
        events: Callable[[], Iterator[Mapping[str, Any]]],
        lines: Callable[[Iterator[Mapping[str, Any]]], Iterator[str]],
    ) -> Response:
        """Return the answer to a call: one JSON object, or a stream of events, written by ``lines``, when the
        request asks for it."""
        is_stream = bool(body.fields.get("stream"))

        def written() -> bytes:
            return ("".join(lines(events())) if is_stream else json.dumps(whole())).encode()

        content = await self._work.run(body.num_bytes + answered.num_bytes, written)
        return Response(content, media_type="text/event-stream" if is_stream else "application/json")

    async def _reward(self, session: AgentSession, body: Body) -> Response:
        """Record the session's reward, one number or several named numbers; a later report replaces an
        earlier one."""
        given = body.fields.get("reward")
        values = given if isinstance(given, dict) else {"reward": given}
        rewards = {str(name): as_number(value) for name, value in values.items() if value is not None}
        if not rewards or None in rewards.values():
            raise BadRequest(
                f"reward={reprlib.repr(given)} must be a number, or named numbers, not all of them null"
            )
        session.reward = {str(name): rewards.get(str(name)) for name in values}
        return JSONResponse({"ok": True})

    async def _restart(self, session: AgentSession, body: Body) -> Response:
        """Forget what a session's agent did. Only the process that runs the agent has the ``restart_key`` for
        this call; the agent itself has not."""
        if body.fields.get("restart_key") != session.restart_key:
            raise BadRequest("only who runs an agent begins its session again", status=403, code="forbidden")
        session.begin_again()
        self._kept.pop(session.key, None)
        return JSONResponse({"ok": True})

    async def _models(self, request: Request) -> Response:
        return JSONResponse(
            {
                "object": "list",
                "data": [_model(MODEL)],
                "has_more": False,
                "first_id": MODEL,
                "last_id": MODEL,
            }
        )

    async def _model(self, request: Request) -> Response:
        """Describe the model of any name: calls may use any model name, and every name means the policy."""
        return JSONResponse(_model(request.path_params["name"]))


async def _unless_gone(request: Request, serving: Coroutine[Any, Any, Response]) -> Response:
    """Return the answer to a request that was read whole, or cancel ``serving`` when the client goes away.

    Clients ask anew after their own timeouts. A cancelled call stops sampling, and is not recorded as a call
    of the session.
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


async def _content(request: Request) -> bytes:
    """Return a request's body. Raises BadRequest when it is too long or stops arriving."""
    length = request.headers.get("content-length", "0")
    content = bytearray()
    if not length.isdecimal() or len(length) > 16 or int(length) > _MAX_BODY_BYTES:
        raise _too_large()
    try:
        async with asyncio.timeout(_MAX_SILENCE_S) as silence:
            async for chunk in request.stream():
                silence.reschedule(asyncio.get_running_loop().time() + _MAX_SILENCE_S)
                content += chunk
                if len(content) > _MAX_BODY_BYTES:
                    raise _too_large()
    except TimeoutError as error:
        reason = f"no more of the body came for {_MAX_SILENCE_S:g} s"
        raise BadRequest(reason, status=408, code="request_timeout") from error
    except ClientDisconnect as error:
        raise BadRequest("the client has disconnected", status=499, code="disconnected") from error
    return bytes(content)


def _too_large() -> BadRequest:
    return BadRequest(f"a request may have {_MAX_BODY_BYTES} bytes", status=413, code="too_large")


def _refused(error: BadRequest, path: str) -> Response:
    # Clients ask again after some refusals; asking again would change none of these.
    headers = {"x-should-retry": "false"}
    return Response(
        json.dumps(refusal(error, path)), error.status, headers=headers, media_type="application/json"
    )


def _model(name: str) -> dict[str, Any]:
    """Return the description of a model, with the fields of both OpenAI and Anthropic."""
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "nemo_like",
        "type": "model",
        "display_name": name,
        "created_at": "1970-01-01T00:00:00Z",
    }


def _data(events: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"data: {json.dumps(event)}\n\n" for event in events)
    yield "data: [DONE]\n\n"


def _named_events(events: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    yield from (f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def _no_signals() -> Any:
    """Leave signal handling to the process that hosts the server."""
    return nullcontext()
