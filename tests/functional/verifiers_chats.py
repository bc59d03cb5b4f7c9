"""A taskset of verifiers whose prompts are messages with calls of tools. Runs in the hubs' interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import verifiers.v1 as vf
from verifiers.v1.types import (
    AssistantMessage,
    ImageUrlContentPart,
    ImageUrlSource,
    ToolCall,
    ToolMessage,
    UserMessage,
)


class ChatTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def num_said(self, trace: vf.Trace) -> float:
        return float(len(trace.nodes))


class ChatTaskset(vf.Taskset[ChatTask, vf.TasksetConfig]):
    def load(self) -> Iterable[ChatTask]:
        call = ToolCall(id="1", name="add", arguments='{"a": 1, "b": 2}')
        prompt = [
            UserMessage(content="1+2?"),
            AssistantMessage(tool_calls=[call], reasoning_content="add them"),
            ToolMessage(tool_call_id="1", content="3", name="add"),
        ]
        yield ChatTask(vf.TaskData(prompt=prompt, system_prompt="Add."), self.config.task)
        image = ImageUrlContentPart(image_url=ImageUrlSource(url="data:,"))
        yield ChatTask(vf.TaskData(prompt=[UserMessage(content=[image])]), self.config.task)


__all__ = ["ChatTaskset"]
