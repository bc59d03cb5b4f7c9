"""What is wrong with the form of responses, from their texts alone. Pure: nothing here waits or calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.algorithms.loss_traits import punishes_messages
from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.algorithms.options import LossConfig
from nemo_like.environments.tool_calls import without_calls
from nemo_like.rollout.options import RolloutConfig


@dataclass(frozen=True, slots=True)
class ResponseForm:
    """What a run looks for in its responses, and by which marks."""

    watched: MessageFlag
    unrewarded: MessageFlag  # what takes a sample its reward
    call_marks: Sequence[str]
    thought_marks: Sequence[str]  # how a thought begins, and how it ends

    @classmethod
    def of(cls, loss: LossConfig, rollout: RolloutConfig) -> ResponseForm | None:
        """Return what a run looks for; None when it looks for nothing."""
        unrewarded = watched = NO_FLAG
        for name in rollout.no_reward_for:
            unrewarded |= MessageFlag[name]
        if punishes_messages(loss):
            watched = MessageFlag.invalid_tool_call | MessageFlag.malformed_thinking
        watched |= unrewarded
        if not watched:
            return None
        return cls(watched, unrewarded, rollout.tool_call_marks, rollout.thinking_marks)

    def of_text(self, text: str, call_pattern: re.Pattern[str] | None, *, is_truncated: bool) -> MessageFlag:
        """Return what is wrong with a response; ``call_pattern`` finds the tool calls of its environment."""
        unread, num_calls = (text, 0) if call_pattern is None else without_calls(text, call_pattern)
        return self.of_parts(text, unread, num_calls=num_calls, is_truncated=is_truncated)

    def of_parts(self, text: str, unread: str, *, num_calls: int, is_truncated: bool) -> MessageFlag:
        """Return what is wrong with a response, of which ``num_calls`` tool calls were read and ``unread`` is
        left."""
        found = NO_FLAG
        if any(mark in unread for mark in self.call_marks):
            found |= MessageFlag.invalid_tool_call
        thought, answer = self._parts(text)
        if thought is None:
            is_cut_short = is_truncated and self._num_marks(text) == 1
            found |= NO_FLAG if is_cut_short else MessageFlag.malformed_thinking
        elif not answer and not num_calls:
            found |= MessageFlag.empty_answer
        elif thought and thought == answer:
            found |= MessageFlag.repeated_thinking
        return found & self.watched

    def _num_marks(self, text: str) -> int:
        return sum(text.count(mark) for mark in self.thought_marks)

    def _parts(self, text: str) -> tuple[str | None, str]:
        """Return the thought and the answer without the blanks around them; None for a malformed thought, and
        an empty one where there is none.

        The template may have begun the thought, so that the text has only the mark that ends it.
        """
        if not self._num_marks(text):
            return "", text.strip()
        begins, ends = self.thought_marks
        thought, end, answer = text.partition(ends)
        thought = thought.lstrip().removeprefix(begins)
        if not end or self._num_marks(f"{thought} {answer}"):
            return None, ""
        return thought.strip(), answer.strip()
