"""Sums by an agent of Pydantic AI, whose answer is a call of a tool too."""

import json
import sys

from pydantic_ai import Agent, ToolOutput, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits


def answer(value: int) -> int:
    """Give the answer."""
    return value


agent = Agent("openai-chat:policy", output_type=ToolOutput(answer, name="answer"))


@agent.tool_plain
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


task = json.load(sys.stdin)
try:
    said = str(agent.run_sync(task["prompt"], usage_limits=UsageLimits(request_limit=4)).output)
except (UnexpectedModelBehavior, UsageLimitExceeded):
    said = ""
print(float(said == task["answer"]))
