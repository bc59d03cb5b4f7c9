"""Sums by an agent of OpenAI's Agents SDK, which speaks /v1/responses."""

import json
import sys

from agents import Agent, MaxTurnsExceeded, ModelSettings, Runner, StopAtTools, function_tool


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


@function_tool
def answer(value: int) -> int:
    """Give the answer."""
    return value


task = json.load(sys.stdin)
agent = Agent(
    name="adder",
    model="policy",
    tools=[add, answer],
    tool_use_behavior=StopAtTools(stop_at_tool_names=["answer"]),
    model_settings=ModelSettings(tool_choice="required", parallel_tool_calls=False),
    reset_tool_choice=False,
)
try:
    said = str(Runner.run_sync(agent, task["prompt"], max_turns=4).final_output)
except MaxTurnsExceeded:
    said = ""
print(float(said == task["answer"]))
