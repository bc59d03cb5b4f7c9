"""What the benchmark asks a side's process for, a turn of steps, an accuracy or the end, and its answers."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection

ACCURACY = "accuracy"  # the request for the share of held-out problems that are answered right


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """How many steps to make; ``num_steps=0`` ends the side."""

    num_steps: int


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side did in a turn: seconds from its begin to the end of each step, and the tokens that each
    step sampled."""

    ends_s: tuple[float, ...]
    new_tokens: tuple[int, ...]
    cpu_s: float = 0.0  # of all its processes, as the benchmark sees them
    accuracy: float | None = None  # on held-out problems after the last step, where it was asked for


def side_arguments(description: str | None) -> argparse.Namespace:
    """Return what the benchmark starts a side's process with."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--pipe", type=int, required=True, help="file descriptor of the benchmark's pipe")
    parser.add_argument("--config", required=True)
    parser.add_argument("--generator", choices=("vllm", "transformers"), default="vllm")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


class SideTurns:
    """A side's end of the pipe. Its process calls ``step_ended`` after each step while ``is_open``."""

    def __init__(self, pipe: int, accuracy: Callable[[], float]) -> None:
        """Tell the benchmark that the side is ready, and wait for the first turn."""
        self._accuracy = accuracy
        self._connection = Connection(pipe)
        self._connection.send(None)
        self.is_open = True
        self._next_turn()

    def step_ended(self, new_tokens: int) -> None:
        """Note the end of a step; after a turn's last step answer the benchmark and wait for its next turn or
        the end."""
        self._ends_s.append(time.perf_counter() - self._began_s)
        self._new_tokens.append(new_tokens)
        if len(self._ends_s) == self._request.num_steps:
            self._connection.send(Turn(tuple(self._ends_s), tuple(self._new_tokens)))
            self._next_turn()

    def _next_turn(self) -> None:
        while (request := self._connection.recv()) == ACCURACY:
            self._connection.send(self._accuracy())
        self._request: TurnRequest = request
        self.is_open = self._request.num_steps > 0
        self._ends_s: list[float] = []
        self._new_tokens: list[int] = []
        self._began_s = time.perf_counter()
