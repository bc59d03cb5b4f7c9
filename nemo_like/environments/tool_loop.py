"""Runs an agent that is a class with tools: the policy may call its methods.

reset(task) ──▶ first message ──▶ policy ──▶ calls of tools ──▶ methods ──▶ results ─┐
                                    ▲                                                │
                                    └────────────────────────────────────────────────┘
no call, or is_done ──▶ reward(answer)
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from typing import Any

import openai
from transformers.utils import get_json_schema

from nemo_like.environments.interface import AgentAccess

# Methods of the class that are no tools.
_OWN = ("reset", "reward")


async def play_with_tools(
    make: Callable[[], Any], task: Mapping[str, Any], access: AgentAccess, *, tool_choice: str, max_calls: int
) -> Any:
    """Make the object, have the policy call its tools, and return the result of its ``reward``.

    ``reset(task)``, if the class has it, returns the first message, or None for the task's prompt. The
    conversation ends when ``is_done`` is true, at the first response without a call, or after ``max_calls``.
    Methods may be async.
    """
    played = make()
    reset = getattr(played, "reset", None)
    first = await _awaited(reset(task)) if reset is not None else None
    prompt = task["prompt"] if first is None else first
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    tools = tools_of(played)
    answer = ""
    async with openai.AsyncOpenAI(
        base_url=access.base_url, api_key=access.api_key, max_retries=0, timeout=None
    ) as client:
        for _ in range(max_calls):
            completion = await client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[schema for _, schema in tools.values()],
                tool_choice=tool_choice,
            )
            message = completion.choices[0].message
            answer = message.content or ""
            messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                result = await _result(tools, call)
                messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
            if getattr(played, "is_done", False):
                break
    return await _awaited(played.reward(answer))


def tools_of(played: object) -> dict[str, tuple[Callable[..., Any], dict[str, Any]]]:
    """Return the public methods of an object and their schemas, which transformers reads from type hints and
    docstrings. Raises ValueError for a class without tools, and the errors of transformers for a method whose
    arguments are not documented."""
    methods = inspect.getmembers(type(played), inspect.isfunction)
    tools = {}
    for name, method in methods:
        if not name.startswith("_") and name not in _OWN:
            tools[name] = (getattr(played, name), get_json_schema(method))
    if not tools:
        raise ValueError(f"the class {type(played).__name__} has no method that could be a tool")
    return tools


async def _result(tools: Mapping[str, tuple[Callable[..., Any], Any]], call: Any) -> str:
    """Call a tool and return its result as text; an error is returned as a text for the policy."""
    name = call.function.name
    if name not in tools:
        return f"error: there is no tool {name!r}; there are {', '.join(tools)}"
    try:
        arguments = json.loads(call.function.arguments or "{}")
        value = await _awaited(tools[name][0](**arguments))
    except Exception as error:
        return f"error: {type(error).__name__}: {error}"
    return value if isinstance(value, str) else json.dumps(value, default=str)


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value
