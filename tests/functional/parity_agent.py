"""An agent whose reward any model earns now and then."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import openai

from scripts.demo_agent.calculator import TOOLS


async def agent(task: Mapping[str, Any], base_url: str, api_key: str) -> float:
    """Have the model call a tool twice; return 1 if the numbers of the second call have an even sum."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600.0)
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    numbers: list[int] = []
    for _ in range(2):
        completion = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, tool_choice="required", parallel_tool_calls=False
        )
        message = completion.choices[0].message
        if not message.tool_calls:
            return 0.0  # cut short
        (call,) = message.tool_calls
        numbers = [*json.loads(call.function.arguments).values()]
        messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "0"}]
    return float(sum(numbers) % 2 == 0)
