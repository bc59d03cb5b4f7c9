"""The rollout's side of an environment with tools: another environment judges what needs no tool any more.

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
    """Answers turns: a pool."""

    @property
    def unanswered(self) -> Sequence[str]: ...

    @property
    def wants_tokens(self) -> bool: ...

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]: ...


class ToolPool:
    """Has tools answer responses that call them, and a judge those that do not."""

    def __init__(self, tools: Answering, judge: Answering) -> None:
        self._tools, self._judge = tools, judge

    @property
    def wants_tokens(self) -> bool:
        """Whether turns need their ``response_ids``."""
        return self._judge.wants_tokens

    @property
    def unanswered(self) -> list[str]:
        """The names of the actors that have a call to answer."""
        return [*self._tools.unanswered, *self._judge.unanswered]

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, in order."""
        answers = list(await self._tools.step(turns))
        over = [place for place, one in enumerate(answers) if one.is_done and one.failure is None]
        judged = await self._judge.step([turns[place] for place in over]) if over else []
        for place, verdict in zip(over, judged, strict=True):
            # An answer to another turn keeps that turn's number, so that whoever asked finds it.
            answers[place] = replace(verdict, metrics={**answers[place].metrics, **verdict.metrics})
        return answers


def tool_pools(env: Mapping[str, EnvConfig], judges: Mapping[str, Answering]) -> dict[str, ToolPool]:
    """Return the pool of each environment with tools, by name, whose own and whose judge's are in
    ``judges``."""
    return {
        name: ToolPool(judges[name], judges[judge])
        for name, cfg in env.items()
        if name in judges and (judge := last_judge(cfg)) is not None and judge in judges
    }
