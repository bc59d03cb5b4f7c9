"""The main function of the child process that runs an environment; its calls interleave on one event loop.

The first call brings the EnvConfig and is answered with the columns of feedback; each later call brings turns
and is answered with feedback. The process ends when its parent does, and ends all processes that the
environment started. The ``state`` that a conversation keeps between turns leaves the process as a pickle and
comes back as one, so that other processes need not be able to load it.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import replace

from nemo_like.batch.columns import Column, Layout
from nemo_like.child_process.child_side import ParentCalls
from nemo_like.environments.feedback import checked
from nemo_like.environments.guardian import run_guarded
from nemo_like.environments.interface import Environment, Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import build_environment, written_columns
from nemo_like.observability.printable import accept_all_characters


class _Host:
    """Builds the environment, and asks it about turns."""

    def __init__(self) -> None:
        self._environment: Environment
        self._columns: tuple[Column, ...]

    def build(self, cfg: EnvConfig) -> tuple[Column, ...]:
        """Build the environment, and return the columns that its feedback may bring."""
        self._environment = build_environment(cfg)
        self._columns = written_columns(self._environment)
        return self._columns

    async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
        """Return one feedback per turn, checked and ready to be sent."""
        given = list(await self._environment.step([_with_state(turn) for turn in turns]))
        if len(given) != len(turns):
            raise ValueError(f"the environment gave {len(given)} answers to {len(turns)} turns")
        feedback = [
            _with_pickled_state(checked(answer, self._columns, len(turn.response_ids)))
            for answer, turn in zip(given, turns, strict=True)
        ]
        if any(column.layout is Layout.objects for column in self._columns):
            pickle.loads(pickle.dumps(feedback))  # some objects can be pickled but not unpickled: fail here
        return feedback


def _with_state(turn: Turn) -> Turn:
    return turn if turn.state is None else replace(turn, state=pickle.loads(turn.state))


def _with_pickled_state(feedback: Feedback) -> Feedback:
    return feedback if feedback.state is None else replace(feedback, state=pickle.dumps(feedback.state))


def main() -> None:
    run_guarded()
    calls, host = ParentCalls(), _Host()
    accept_all_characters()
    if calls.answer_first(host.build):
        calls.serve(host.step)


if __name__ == "__main__":
    main()
