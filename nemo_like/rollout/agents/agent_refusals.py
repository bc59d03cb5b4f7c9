"""The JSON with which each API refuses a request, in the wording that harnesses look for. Pure."""

from __future__ import annotations

from typing import Any

from nemo_like.rollout.agents.agent_request import BadRequest, PromptTooLong

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
