"""An agent as people write them for OpenAI's API, a loop around a calculator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

import openai

MAX_CALLS = 4
_TIMEOUT_S = 600.0  # also for connecting, for which the client's own five seconds are few on a busy machine
_NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}


def _tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


TOOLS = [_tool("add", a=_NUMBER, b=_NUMBER), _tool("answer", value=_NUMBER)]


@cache
def _client() -> openai.AsyncOpenAI:
    """Return the client whose connections all conversations use."""
    return openai.AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=_TIMEOUT_S)


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Have the model add numbers until it answers, in at most four calls; return 1 for the right answer."""
    client = _client().with_options(base_url=base_url, api_key=api_key)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    for _ in range(MAX_CALLS):
        completion = await client.chat.completions.create(
            model="policy",
            messages=messages,
            tools=TOOLS,
            tool_choice="required",
            parallel_tool_calls=False,
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return 0.0  # cut short
        (call,) = message.tool_calls
        arguments = json.loads(call.function.arguments)
        if call.function.name == "answer":
            return float(str(arguments["value"]) == task["answer"])
        messages.append(message)
        result = str(arguments["a"] + arguments["b"])
        messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    return 0.0
