"""OpenAI's /v1/responses, translated from and to a chat completion.

The messages of a response are kept by its id until the session ends, so that a later request can continue it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from nemo_like.rollout.agents.agent_calls import CallAnswer, tool_calls
from nemo_like.rollout.agents.agent_chat_api import MODEL, pieces
from nemo_like.rollout.agents.agent_request import BadRequest, an_object, objects, refuse_fields, text_of

# Fields that would change the prompt or the time of the answer, with what to send in their place.
_INSTEAD = {
    "conversation": "send input, with previous_response_id or all of the conversation",
    "prompt": "the endpoint has no stored prompts; send instructions and input",
    "background": "an answer comes when it is whole",
}


def as_chat(body: Mapping[str, Any], kept: Mapping[str, Sequence[dict[str, Any]]]) -> dict[str, Any]:
    """Return a request to /v1/responses as a chat completion; ``kept`` has the messages of earlier responses
    by id. Raises BadRequest when it is malformed."""
    refuse_fields(body, _INSTEAD)
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": body["instructions"]})
    if (previous := text_of(body, "previous_response_id")) is not None:
        if previous not in kept:
            raise BadRequest(f"no response {previous!r} in this session", status=404, code="not_found")
        messages += [one for one in kept[previous] if one["role"] != "system" or not body.get("instructions")]
    messages += _messages(body.get("input"))
    chat: dict[str, Any] = {"messages": messages, "max_tokens": body.get("max_output_tokens")}
    if tools := objects(body, "tools"):
        chat["tools"] = [_tool(tool) for tool in tools]
        chat["tool_choice"] = _choice(body.get("tool_choice") or "auto")
        if body.get("parallel_tool_calls") is not None:
            chat["parallel_tool_calls"] = body["parallel_tool_calls"]
    if (form := an_object(an_object(body, "text"), "format")) and form.get("type") != "text":
        chat["response_format"] = (
            {"type": "json_schema", "json_schema": {key: form[key] for key in form if key != "type"}}
            if form.get("type") == "json_schema"
            else form
        )
    return chat


def response_answer(answered: CallAnswer, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON answer of /v1/responses."""
    (choice,) = answered.choices
    output: list[dict[str, Any]] = []
    if choice.parsed.content:
        text = {"type": "output_text", "text": choice.parsed.content, "annotations": [], "logprobs": []}
        output.append(
            {
                "id": f"msg_{answered.name}",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [text],
            }
        )
    for call in tool_calls(choice.parsed, choice.call_ids):
        item = {
            "id": f"fc_{call['id']}",
            "type": "function_call",
            "call_id": call["id"],
            "status": "completed",
        }
        output.append({**item, **call["function"]})
    is_cut = choice.finish_reason == "length"
    return {
        "id": response_id(answered),
        "object": "response",
        "created_at": int(time.time()),
        "model": body.get("model") or MODEL,
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "error": None,
        "instructions": body.get("instructions"),
        "metadata": body.get("metadata") or {},
        "output": output,
        "parallel_tool_calls": body.get("parallel_tool_calls", True),
        "previous_response_id": body.get("previous_response_id"),
        "temperature": None,
        "top_p": None,
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "usage": {
            "input_tokens": answered.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": answered.num_continued},
            "output_tokens": answered.num_response_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": answered.num_prompt_tokens + answered.num_response_tokens,
        },
    }


def response_events(answered: CallAnswer, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the events of a streamed response; each event's ``type`` is also its name."""
    events = _events(response_answer(answered, body))
    yield from ({**event, "sequence_number": number} for number, event in enumerate(events))


def response_id(answered: CallAnswer) -> str:
    """Return the id that a later request sends to continue this response."""
    return f"resp_{answered.name}"


def _events(whole: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    begun = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for place, item in enumerate(whole["output"]):
        is_text = item["type"] == "message"
        where = {"output_index": place, "item_id": item["id"]}
        empty = {**item, "status": "in_progress", **({"content": []} if is_text else {"arguments": ""})}
        yield {"type": "response.output_item.added", "output_index": place, "item": empty}
        if is_text:
            (part,) = item["content"]
            where["content_index"] = 0
            yield {"type": "response.content_part.added", **where, "part": {**part, "text": ""}}
            for piece in pieces(part["text"]):
                yield {"type": "response.output_text.delta", **where, "delta": piece, "logprobs": []}
            yield {"type": "response.output_text.done", **where, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **where, "part": part}
        else:
            for piece in pieces(item["arguments"]):
                yield {"type": "response.function_call_arguments.delta", **where, "delta": piece}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **where, **done}
        yield {"type": "response.output_item.done", "output_index": place, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _messages(given: Any) -> list[dict[str, Any]]:
    """Return the input as messages of a chat completion."""
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise BadRequest("input must be a text or a list")
    messages: list[dict[str, Any]] = []
    thoughts: list[str] = []  # before the message or call that they led to
    for item in given:
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind == "message":
            said = {"role": item.get("role"), "content": item.get("content")}
            if said["role"] == "assistant":
                said |= _reasoning(thoughts)
            is_own = messages and messages[-1].get("is_open") and said["role"] == "assistant"
            messages.append({**said, "is_open": said["role"] == "assistant" and not is_own})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            if not messages or not messages[-1].get("is_open"):
                messages.append({"role": "assistant", "content": None, "is_open": True})
            messages[-1] |= _reasoning(thoughts)
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            said = {"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")}
            messages.append(said)
        elif kind == "reasoning":
            parts = objects(item, "content") or objects(item, "summary")
            thoughts += [text for part in parts if (text := text_of(part, "text"))]
        else:
            raise BadRequest(f"input of type {kind!r} is not served")
    return [{key: value for key, value in one.items() if key != "is_open"} for one in messages]


def _reasoning(thoughts: list[str]) -> dict[str, str]:
    """Take the thoughts collected so far out of ``thoughts``, as a field of the message or call that they led
    to."""
    text = "\n".join(thoughts)
    thoughts.clear()
    return {"reasoning_content": text} if text else {}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise BadRequest(f"only tools of type function are served, not {str(tool)[:80]!r}")
    names = ("name", "description", "parameters", "strict")
    function = {key: tool[key] for key in names if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [_named(tool) for tool in objects(choice, "tools")]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return _named(choice) if choice.get("type") == "function" else choice


def _named(tool: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": tool.get("name")}}
