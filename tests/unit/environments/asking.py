"""One turn asked of one kind of environment, in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.registry import build_environment
from tests.unit.environments.configs import env_config


def turn(response: str, answer: str = "", **others: Any) -> Turn:
    return Turn(**{"prompt": "", "response": response, "answer": answer, "is_truncated": False, **others})


def ask(kind: str, *turns: Turn, **options: Any) -> list[Feedback]:
    """The feedback of ``configs/env/<kind>.yaml`` with these options."""
    environment = build_environment(env_config(kind, options=options))
    return list(asyncio.run(environment.step(turns)))


def judge(kind: str, response: str, answer: str = "", *, data: Any = None, **options: Any) -> Feedback:
    """The feedback to one response."""
    (feedback,) = ask(kind, turn(response, answer, data=data or {}), **options)
    return feedback
