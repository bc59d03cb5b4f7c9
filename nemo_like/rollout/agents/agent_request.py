"""Reads a request's body and fields with the types that the APIs prescribe, and words refusals. Pure.

bytes ──▶ read_body ──▶ a JSON object ──▶ whole_number, text_of, an_object, objects, ...
            └──────────────────────────────┴──▶ BadRequest ──▶ refusal, in the wording that harnesses look for
"""

from __future__ import annotations

import gc
import json
import re
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.data.messages import MAX_LEVELS, is_shallow

# How JSON writes one half of a surrogate pair. Such a half alone is no character, and has no UTF-8.
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_MAX_STOP_STRINGS = 128  # the engine looks for each of them after every token


class BadRequest(Exception):
    """A request that cannot be served; the message says why, and ``code`` is OpenAI's name of the error."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


class PromptTooLong(BadRequest):
    """A prompt that leaves no room for a response within ``limit`` tokens."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {num_tokens} tokens, which leaves no room for a response in {limit}",
            code="context_length_exceeded",
        )
        self.num_tokens, self.limit = num_tokens, limit


def read_body(content: bytes) -> dict[str, Any]:
    """Return the JSON object of a request's body; an empty body gives an empty object.

    Raises BadRequest for anything but an object, for an object that is nested too deeply, and for text that
    is not valid Unicode.
    """
    try:
        # By itself, json.loads lets surrogates in UTF-8 pass.
        text = content.decode()
        body = _parsed(text or "{}")
        if _SURROGATE.search(text):
            json.dumps(body, ensure_ascii=False).encode()
        is_readable = is_shallow(body)
    except RecursionError:
        is_readable = False
    except ValueError as error:  # of the decoders, and of the encoder
        raise BadRequest(f"the body is no JSON in UTF-8: {error}") from error
    if not is_readable:
        raise BadRequest(f"the body is nested deeper than {MAX_LEVELS} levels")
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object")
    return body


def _parsed(text: str) -> Any:
    """Parse JSON with Python's garbage collector off.

    Parsing makes no garbage, yet the collector would scan the whole process again and again and make it
    twenty times slower. The interpreter runs no other thread meanwhile.
    """
    try:
        gc.disable()
        return json.loads(text)
    finally:
        gc.enable()


def whole_number(
    body: Mapping[str, Any], key: str, default: int | None, least: int | None, most: int | None = None
) -> int | None:
    """Return a field that is a whole number from ``least`` to ``most``, or ``default`` when the field is
    missing. Raises BadRequest for another value."""
    value = body.get(key)
    if value is None:
        return default
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or (least is not None and value < least) or (most is not None and value > most):
        bounds = f" from {least}" * (least is not None) + f" to {most}" * (most is not None)
        raise BadRequest(f"{key}={reprlib.repr(value)} must be a whole number{bounds}")
    return int(value)


def stop_strings(body: Mapping[str, Any], key: str = "stop") -> tuple[str, ...]:
    """Return the texts that end a response. Raises BadRequest for a value of another type and for too many
    texts."""
    stop = body.get(key) or []
    stop = [stop] if isinstance(stop, str) else stop
    if not isinstance(stop, list) or not all(isinstance(one, str) and one for one in stop):
        raise BadRequest(f"{key} must be a text or a list of texts, none of them empty")
    if len(stop) > _MAX_STOP_STRINGS:
        raise BadRequest(f"{key} has {len(stop)} texts; at most {_MAX_STOP_STRINGS} are looked for")
    return tuple(stop)


def text_of(body: Mapping[str, Any], key: str) -> str | None:
    """Return a text field, or None when it is missing. Raises BadRequest for another value."""
    value = body.get(key)
    if not isinstance(value, str | None):
        raise BadRequest(f"{key}={reprlib.repr(value)} must be text")
    return value


def an_object(body: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return a field that is an object, or an empty object when it is missing. Raises BadRequest for another
    value."""
    value = body.get(key)
    if not isinstance(value, dict | None):
        raise BadRequest(f"{key}={reprlib.repr(value)} must be an object")
    return value or {}


def objects(body: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """Return a field that is a list of objects, or an empty list when it is missing. Raises BadRequest for
    another value."""
    value = body.get(key)
    if not isinstance(value, list | None) or not all(isinstance(one, dict) for one in value or ()):
        raise BadRequest(f"{key}={reprlib.repr(value)} must be a list of objects")
    return value or []


def refuse_fields(body: Mapping[str, Any], instead: Mapping[str, str]) -> None:
    """Raise BadRequest for a field that is not served although it would change the meaning of the answer.
    ``instead`` has these fields, each with what to send in its place."""
    for key in instead.keys() & {key for key, value in body.items() if value}:
        raise BadRequest(f"{key} is not served; {instead[key]}", code="unsupported_parameter")


def check_token_ids(token_ids: Sequence[int], num_ids: int) -> None:
    """Raise BadRequest when a token id is not in the tokenizer's range from 0 to ``num_ids`` - 1."""
    for one in token_ids:
        if not 0 <= one < num_ids:
            raise BadRequest(f"prompt has the token id {reprlib.repr(one)}; ids are 0 to {num_ids - 1}")


_ANTHROPIC_PATH = "/v1/messages"
# Anthropic's types of errors by status.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    500: "api_error",
}
# OpenAI's name of the prompt, by path; at every other path it is "prompt".
_OPENAI_PROMPTS = {"/v1/chat/completions": "messages", "/v1/responses": "input"}


def refusal(error: BadRequest, path: str) -> dict[str, Any]:
    """Return the JSON with which the API at ``path`` refuses a request."""
    if path.startswith(_ANTHROPIC_PATH):
        kind = _ANTHROPIC_TYPES.get(error.status, "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": _anthropic_message(error)}}
    param = _OPENAI_PROMPTS.get(path, "prompt") if isinstance(error, PromptTooLong) else None
    kind = "server_error" if error.status >= 500 else "invalid_request_error"
    message = _openai_message(error, str(param))
    return {"error": {"message": message, "type": kind, "param": param, "code": error.code}}


def _anthropic_message(error: BadRequest) -> str:
    if not isinstance(error, PromptTooLong):
        return str(error)
    # One token of the limit is left for the response.
    return f"prompt is too long: {error.num_tokens} tokens > {error.limit - 1} maximum"


def _openai_message(error: BadRequest, param: str) -> str:
    if not isinstance(error, PromptTooLong):
        return str(error)
    # The API of responses has a sentence of its own, which is said first.
    first = "Your input exceeds the context window of this model. " if param == "input" else ""
    return (
        f"{first}This model's maximum context length is {error.limit} tokens. However, your {param} resulted "
        f"in {error.num_tokens} tokens. Please reduce the length of the {param}."
    )
