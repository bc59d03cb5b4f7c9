"""Conversations and responses for tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.interface import Feedback
from nemo_like.generation.interface import Response
from nemo_like.rollout.conversation import Conversation, Limits


def response(
    tokens: list[int], logprobs: list[float] | None = None, *, is_truncated: bool = False
) -> Response:
    values = [-0.5] * len(tokens) if logprobs is None else logprobs
    return Response(np.array(tokens, np.int32), np.array(values, np.float32), is_truncated)


def routed(tokens: list[int], *, routes: list[int], context: list[int]) -> Response:
    """A response with a column ``routes`` for its tokens and for those before it."""
    columns = {"routes": np.array(routes, np.uint8)}
    return replace(response(tokens), columns=columns, context_columns={"routes": np.array(context, np.uint8)})


def conversation(
    prompt_ids: tuple[int, ...] = (4, 5),
    *,
    position: int = 0,
    generation: int = 0,
    max_turns: int = 1,
    max_tokens: int = 100,
    **example: Any,
) -> Conversation:
    problem = TaskPrompt(**{"prompt": "p", "answer": "a", "env": "sums", **example})
    limits = Limits(max_turns, max_tokens)
    return Conversation(problem, prompt_ids, position, generation, limits, seed=10 * position + generation)


def finished(
    prompt_ids: tuple[int, ...], answered: Response, feedback: Feedback, position: int = 0
) -> Conversation:
    """A conversation of one turn, sampled by policy version 3."""
    sample = conversation(prompt_ids, position=position)
    sample.add_response(answered, "text", 3)
    sample.add_feedback(feedback)
    return sample
