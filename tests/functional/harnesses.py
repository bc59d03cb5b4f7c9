"""Agents of tests: what people write with the clients that there are, unchanged; and some that misbehave."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import openai

from scripts.demo_agent import calculator

Task = Mapping[str, Any]

_NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ADD = {
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": _NUMBER, "b": _NUMBER},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


def _sum(arguments: str) -> str:
    given = json.loads(arguments)
    return str(given["a"] + given["b"])


def named(task: Task, base_url: str, api_key: str) -> Any:
    """The agent that the problem names: a process has several, since its start takes longer than they do."""
    return globals()[task["data"]["agent"]](task, base_url, api_key)


def openai_sync(task: Task, base_url: str, api_key: str) -> float:
    """Three calls of a tool, by OpenAI's client, and then an answer in JSON."""
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        assert [model.id for model in client.models.list()] == ["policy"]
        assert client.models.retrieve("policy").id == "policy"
        for _ in range(3):
            said = client.chat.completions.create(
                model="policy",
                messages=messages,
                tools=[{"type": "function", "function": {**ADD, "strict": True}}],
                tool_choice="required",
                parallel_tool_calls=False,
                logprobs=True,
                top_logprobs=2,
                temperature=0.2,
            )
            choice = said.choices[0]
            assert choice.finish_reason == "tool_calls"
            assert said.usage is not None and len(choice.logprobs.content) == said.usage.completion_tokens
            assert all(len(one.top_logprobs) == 2 for one in choice.logprobs.content)
            (call,) = choice.message.tool_calls
            messages.append(choice.message)
            messages.append(
                {"role": "tool", "tool_call_id": call.id, "content": _sum(call.function.arguments)}
            )
        said = client.chat.completions.create(
            model="policy",
            messages=messages,
            response_format={
                "type": "json_schema",
                "json_schema": {
                    "name": "answer",
                    "schema": {
                        "type": "object",
                        "properties": {"x": _NUMBER},
                        "required": ["x"],
                        "additionalProperties": False,
                    },
                },
            },
        )
        return float(json.loads(said.choices[0].message.content)["x"])


async def openai_async(task: Task, base_url: str, api_key: str) -> dict[str, float]:
    """Completions of text, and several choices of chat, by the asynchronous client."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        first = await client.completions.create(
            model="policy", prompt=task["prompt"], max_tokens=5, logprobs=1
        )
        text = first.choices[0].text
        assert len(first.choices[0].logprobs.tokens) == first.usage.completion_tokens
        second = await client.completions.create(
            model="policy", prompt=f"{task['prompt']}{text} and", max_tokens=3, seed=3
        )
        assert second.usage.prompt_tokens_details.cached_tokens > 0
        chat = await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "?"}], n=3, max_tokens=4, stop=["1", "2"]
        )
        assert len(chat.choices) == 3
        assert not any("1" in choice.message.content for choice in chat.choices)
    return {"calls": 3.0, "choices": float(len(chat.choices))}


async def openai_streaming(task: Task, base_url: str, api_key: str) -> float:
    """A streamed chat with a tool, and a streamed response of the newer API."""
    tools: Any = [{"type": "function", "function": {**ADD, "strict": True}}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        async with client.chat.completions.stream(
            model="policy",
            messages=[{"role": "user", "content": task["prompt"]}],
            tools=tools,
            tool_choice="required",
            parallel_tool_calls=False,
            stream_options={"include_usage": True},
        ) as stream:
            final = await stream.get_final_completion()
        (call,) = final.choices[0].message.tool_calls
        assert final.usage.completion_tokens > 0
        own: Any = [{"type": "function", **ADD, "strict": True}]
        async with client.responses.stream(
            model="policy",
            input=task["prompt"],
            tools=[*own, {"type": "function", "name": "other", "parameters": {"type": "object"}}],
            tool_choice={
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "add"}],
            },
        ) as events:
            response = await events.get_final_response()
        item = next(one for one in response.output if one.type == "function_call")
        output = {"type": "function_call_output", "call_id": item.call_id, "output": _sum(item.arguments)}
        after = await client.responses.create(
            model="policy",
            previous_response_id=response.id,
            input=[output],
            max_output_tokens=4,
            tools=response.tools,
        )
        assert after.usage.input_tokens_details.cached_tokens > 0
    return float(_sum(call.function.arguments))


async def anthropic_messages(task: Task, base_url: str, api_key: str) -> float:
    """A tool by Anthropic's client, streamed and not."""
    import anthropic

    tools: Any = [{"name": "add", "description": "Add.", "input_schema": ADD["parameters"]}]
    messages: list[Any] = [{"role": "user", "content": task["prompt"]}]
    async with anthropic.AsyncAnthropic(base_url=base_url.removesuffix("/v1"), api_key=api_key) as client:
        counted = await client.messages.count_tokens(
            model="policy", messages=messages, tools=tools, system="Use the tool."
        )
        assert (await client.models.retrieve("policy")).id == "policy"
        said = await client.messages.create(
            model="policy",
            max_tokens=32,
            messages=messages,
            tools=tools,
            system="Use the tool.",
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
        )
        assert said.stop_reason == "tool_use"
        assert said.usage.input_tokens == counted.input_tokens
        used = next(one for one in said.content if one.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used.id, "content": "46"}
        messages += [
            {"role": "assistant", "content": [one.model_dump() for one in said.content]},
            {"role": "user", "content": [result]},
        ]
        async with client.messages.stream(
            model="policy", max_tokens=8, messages=messages, tools=tools, system="Use the tool."
        ) as stream:
            final = await stream.get_final_message()
        assert final.usage.cache_read_input_tokens > 0
    return float(used.input["a"] + used.input["b"])


def smolagents_tools(task: Task, base_url: str, api_key: str) -> float:
    """An agent of smolagents with one tool, whose calls structured outputs keep well-formed."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def add(a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a + b

    model = OpenAIServerModel("policy", api_base=base_url, api_key=api_key, max_tokens=200)
    agent = ToolCallingAgent(tools=[add], model=model, max_steps=2, verbosity_level=0)
    agent.run(task["prompt"])
    return float(len(agent.memory.steps))


def mini_swe_agent(task: Task, base_url: str, api_key: str) -> float:
    """mini-swe-agent in a throwaway repository, run as its users run it."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["git", "init", "-q", folder], check=True)
        Path(folder, "notes.txt").write_text("nothing\n")
        return run_mini_swe_agent(task["prompt"], Path(folder), base_url, api_key)


def run_mini_swe_agent(prompt: str, folder: Path, base_url: str, api_key: str) -> float:
    """Run the agent on a task in a folder; return how many times it asked the model."""
    os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")
    os.environ.setdefault("MSWEA_COST_TRACKING", "ignore_errors")
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    model = LitellmModel(
        model_name="openai/policy",
        model_kwargs={"api_base": base_url, "api_key": api_key, "max_tokens": 64, "tool_choice": "required"},
    )
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=str(folder)),
        system_template="You have a shell.",
        instance_template="{{task}}",
        step_limit=2,
    )
    agent.run(prompt)
    return float(model.n_calls if hasattr(model, "n_calls") else 2)


async def compacting(task: Task, base_url: str, api_key: str) -> float:
    """A conversation that is cut down to a summary, and two sub-agents with conversations of their own."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def say(messages: list[Any]) -> list[Any]:
            said = await client.chat.completions.create(model="policy", messages=messages, max_tokens=6)
            return [*messages, {"role": "assistant", "content": said.choices[0].message.content}]

        main = await say([{"role": "user", "content": task["prompt"]}])
        main = await say([*main, {"role": "user", "content": "go on"}])
        for number in range(2):
            sub = await say([{"role": "user", "content": f"help {number}"}])
            sub = await say([*sub, {"role": "user", "content": "more"}])
            main = await say([*main, {"role": "user", "content": sub[-1]["content"]}])
        summary = await say([{"role": "user", "content": "summary: " + main[-1]["content"]}])
        await say([*summary, {"role": "user", "content": "end"}])
    return 1.0


async def reporting(task: Task, base_url: str, api_key: str) -> None:
    """A reward by POST, and none returned."""
    headers = {"Authorization": f"Bearer {api_key}"}
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages: Any = [{"role": "user", "content": task["prompt"]}]
        await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
    async with httpx.AsyncClient(headers=headers) as client:
        body = {"reward": {"right": 0.5, "short": 0.25}}
        (await client.post(f"{base_url}/reward", json=body)).raise_for_status()


class Adder:
    """A class with tools, as TRL's environments are."""

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus, self.num_calls, self.is_done = bonus, 0, False

    def reset(self, task: Task) -> str:
        return f"{task['prompt']}"

    def add(self, a: int, b: int) -> int:
        """Add two numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        self.num_calls += 1
        self.is_done = self.num_calls == 2
        return a + b

    def reward(self, answer: str) -> float:
        return self.num_calls + self.bonus


async def calculator_loop(task: Task, base_url: str, api_key: str) -> float:
    """The demo's agent."""
    return await calculator.agent(task, base_url, api_key)


async def varied(task: Task, base_url: str, api_key: str) -> float:
    """One call without tools, which any policy can answer; one of five rewards, by a hash of the response."""
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=600.0) as client:
        asked: list[Any] = [{"role": "user", "content": task["prompt"]}]
        said = await client.chat.completions.create(model="policy", messages=asked)
    return zlib.crc32(f"{task['prompt']}{said.choices[0].message.content}".encode()) % 5 / 4


# ------------------------------------------------------------------ misbehaving


async def misbehaving(task: Task, base_url: str, api_key: str, late_s: float = 0.0) -> Any:
    """One way to misbehave for each place in the batch; the others behave."""
    place = task["data"]["place"]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key, max_retries=0) as client:

        async def ask() -> None:
            messages: Any = [{"role": "user", "content": task["prompt"]}]
            await client.chat.completions.create(model="policy", messages=messages, max_tokens=2)

        if place == 0:
            raise RuntimeError("the harness broke")
        if place == 1:
            import asyncio

            await asyncio.sleep(3600)
        if place == 2:
            return "a good reward"
        if place == 3:
            while True:
                await ask()
        if place == 4:
            return 1.0  # without a call
        await ask()
        if place == 5:
            import asyncio

            asyncio.get_running_loop().call_later(late_s / 2, _call_late, base_url, api_key)
        if place == 6:
            return float("nan")
        if place == 7:  # to forget what it said is not the agent's to ask for
            headers, guess = {"x-api-key": api_key}, {"restart_key": api_key}
            async with httpx.AsyncClient(headers=headers) as plain:
                return (await plain.post(f"{base_url}/session/restart", json=guess)).status_code
    return 1.0


def _call_late(base_url: str, api_key: str) -> None:
    httpx.post(f"{base_url}/chat/completions", headers={"x-api-key": api_key}, json={"messages": []})


def crashing(task: Task, base_url: str, api_key: str) -> float:
    """Ends its process where the place is 1, while others are at work in it."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.completions.create(model="policy", prompt=task["prompt"], max_tokens=2)
        if task["data"]["place"] == 1:
            os._exit(3)
        time.sleep(1)
    return 1.0


def stuck(task: Task, base_url: str, api_key: str) -> float:
    """A thread that never ends where the place is 0."""
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        client.completions.create(model="policy", prompt=task["prompt"], max_tokens=2)
    while task["data"]["place"] == 0:
        time.sleep(0.1)
    return 1.0
