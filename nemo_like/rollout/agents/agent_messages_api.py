"""Anthropic's /v1/messages, translated from and to a chat completion."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from nemo_like.rollout.agents.agent_calls import CallAnswer, tool_calls
from nemo_like.rollout.agents.agent_chat_api import MODEL, pieces
from nemo_like.rollout.agents.agent_request import (
    BadRequest,
    an_object,
    objects,
    refuse_fields,
    stop_strings,
    text_of,
)

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_INSTEAD = {
    "mcp_servers": "the agent itself calls the tools of such servers",
    "container": "the agent itself runs code",
}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return a request to /v1/messages as a chat completion. Raises BadRequest when it is malformed."""
    refuse_fields(body, _INSTEAD)
    messages: list[dict[str, Any]] = []
    if system := body.get("system"):
        messages.append({"role": "system", "content": system})
    if not isinstance(body.get("messages"), list):
        raise BadRequest("messages must be a list")
    for message in body["messages"]:
        messages += _messages(message)
    chat: dict[str, Any] = {"messages": messages, "max_tokens": body.get("max_tokens")}
    if stop := stop_strings(body, "stop_sequences"):
        chat["stop"] = list(stop)
    if tools := objects(body, "tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat |= _choice(an_object(body, "tool_choice") or {"type": "auto"})
    return chat


def message_answer(answered: CallAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON answer of /v1/messages."""
    (choice,) = answered.choices
    content: list[dict[str, Any]] = []
    if choice.parsed.content:
        content.append({"type": "text", "text": choice.parsed.content})
    for call in tool_calls(choice.parsed, choice.call_ids):
        name, given = call["function"]["name"], json.loads(call["function"]["arguments"])
        content.append({"type": "tool_use", "id": call["id"], "name": name, "input": given})
    reasons = {"tool_calls": "tool_use", "length": "max_tokens", "stop": "end_turn"}
    ended_by = next((one for one in stop_strings(body, "stop_sequences") if _ends_with(answered, one)), None)
    return {
        "id": f"msg_{answered.name}",
        "type": "message",
        "role": "assistant",
        "model": body.get("model") or MODEL,
        "content": content,
        "stop_reason": "stop_sequence" if ended_by else reasons[choice.finish_reason],
        "stop_sequence": ended_by,
        "usage": {
            "input_tokens": answered.num_prompt_tokens - answered.num_continued,
            "cache_read_input_tokens": answered.num_continued,
            "cache_creation_input_tokens": 0,
            "output_tokens": answered.num_response_tokens,
        },
    }


def message_events(answered: CallAnswer, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed message; each event's ``type`` is also its name."""
    whole = message_answer(answered, body)
    begun = {**whole, "content": [], "stop_reason": None, "stop_sequence": None}
    yield {"type": "message_start", "message": {**begun, "usage": {**whole["usage"], "output_tokens": 0}}}
    for index, block in enumerate(whole["content"]):
        is_text = block["type"] == "text"
        empty = {**block, "text": ""} if is_text else {**block, "input": {}}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for piece in pieces(block["text"] if is_text else json.dumps(block["input"])):
            delta = (
                {"type": "text_delta", "text": piece}
                if is_text
                else {"type": "input_json_delta", "partial_json": piece}
            )
            yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": whole["stop_sequence"]}
    yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _messages(message: Any) -> Iterator[dict[str, Any]]:
    """Yield a message in OpenAI's form, in which each tool result is a message of its own."""
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        raise BadRequest(f"a message must have the role user or assistant: {str(message)[:80]!r}")
    content = message.get("content")
    if not isinstance(content, list):
        yield {"role": message["role"], "content": content}
        return
    texts: list[Any] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "tool_result":
            result = {"tool_call_id": block.get("tool_use_id"), "content": block.get("content")}
            yield {"role": "tool", **result, **({"is_error": True} if block.get("is_error") else {})}
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": json.dumps(an_object(block, "input"))}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking") or ""))
        elif kind != "redacted_thinking":  # which nobody but its model can read
            texts.append(block)
    if texts or calls or thoughts:
        said: dict[str, Any] = {"role": message["role"], "content": texts or None}
        said |= {"reasoning_content": "\n".join(thoughts)} if thoughts else {}
        yield {**said, "tool_calls": calls} if calls else said


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if "input_schema" not in tool:
        raise BadRequest(f"a tool needs name and input_schema; tools of the server are not served: {tool!r}")
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    if description := text_of(tool, "description"):
        function["description"] = description
    return {"type": "function", "function": function}


def _choice(choice: Mapping[str, Any]) -> dict[str, Any]:
    kind = text_of(choice, "type")
    one_call = {"parallel_tool_calls": False} if kind and choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        return {"tool_choice": {"type": "function", "function": {"name": choice.get("name")}}, **one_call}
    if kind not in _CHOICES:
        raise BadRequest(f"tool_choice must have the type auto, any, tool or none: {choice!r}")
    return {"tool_choice": _CHOICES[kind], **one_call}


def _ends_with(answered: CallAnswer, stop: str) -> bool:
    (choice,) = answered.choices
    return choice.finish_reason == "stop" and choice.stopped_by == stop
