"""The rollout's handle of an environment with tools, where another environment judges the last response.

turns ──▶ the pool with the tools ──▶ a call: its result is the observation
                               └─▶ no call: the pool of options.judge ──▶ reward
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import last_judge


class Answering(Protocol):
    """Answers turns with feedback. A pool is one."""

    @property
    def unanswered(self) -> Sequence[str]: ...

    @property
    def wants_tokens(self) -> bool: ...

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]: ...


class ToolPool:
    """Has the tools answer responses that call them, and the judge answer responses that do not."""

    def __init__(self, tools: Answering, judge: Answering) -> None:
        self._tools, self._judge = tools, judge

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""
        return self._judge.wants_tokens

    @property
    def unanswered(self) -> list[str]:
        """The names of the actors that have an unanswered call."""
        return [*self._tools.unanswered, *self._judge.unanswered]

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, in order."""
        answers = list(await self._tools.step(turns))
        over = [place for place, one in enumerate(answers) if one.is_done and one.failure is None]
        judged = await self._judge.step([turns[place] for place in over]) if over else []
        for place, verdict in zip(over, judged, strict=True):
            # An answer to another turn keeps that turn's number, so that the caller notices it.
            answers[place] = replace(verdict, metrics={**answers[place].metrics, **verdict.metrics})
        return answers


def tool_pools(env: Mapping[str, EnvConfig], judges: Mapping[str, Answering]) -> dict[str, ToolPool]:
    """Return, by name, the pool of each environment with tools, if its own pool and its judge's are in
    ``judges``."""
    return {
        name: ToolPool(judges[name], judges[judge])
        for name, cfg in env.items()
        if name in judges and (judge := last_judge(cfg)) is not None and judge in judges
    }
