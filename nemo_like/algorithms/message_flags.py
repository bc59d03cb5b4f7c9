"""What can be wrong with the form of a response; column ``message_flags`` has these bits on its tokens."""

from __future__ import annotations

from enum import IntFlag


class MessageFlag(IntFlag):
    """What is wrong with a response, whatever its reward."""

    invalid_tool_call = 1  # a mark of tool calls is in the text, outside of all calls that could be read
    malformed_thinking = 2  # marks of thoughts that do not make one thought before the answer
    empty_answer = 4  # nothing follows the thought, and no tool is called
    repeated_thinking = 8  # the answer is the thought once more


NO_FLAG = MessageFlag(0)
