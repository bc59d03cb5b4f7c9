"""Advantages of responses of a wrong form, in place of those that their rewards give (NeMo-RL, message-level
advantage penalties)."""

from __future__ import annotations

from torch import Tensor

from nemo_like.algorithms.message_flags import MessageFlag
from nemo_like.algorithms.options import LossConfig


def with_penalties(advantages: Tensor, flags: Tensor, loss: LossConfig) -> Tensor:
    """Return the advantages with those of flagged tokens replaced, [M] float32.

    ``flags`` [M] has the bits of ``MessageFlag``. Of a response with both flags the tool call counts.
    """
    # The last replacement holds.
    for flag, penalty in (
        (MessageFlag.malformed_thinking, loss.malformed_thinking_advantage),
        (MessageFlag.invalid_tool_call, loss.invalid_tool_call_advantage),
    ):
        if penalty is not None:
            advantages = advantages.masked_fill((flags & flag) > 0, penalty)
    return advantages
