"""What a side's process tells the benchmark, and the benchmark's requests: a turn of steps, or the end."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """How many steps to make; ``num_steps=0`` ends the side."""

    num_steps: int
    measure_accuracy: bool = False


@dataclass(frozen=True, slots=True)
class Turn:
    """What a side did in a turn: seconds from its begin to the end of each step, and the tokens that each
    step sampled."""

    ends_s: tuple[float, ...]
    new_tokens: tuple[int, ...]
    accuracy: float | None  # on held-out problems after the last step, beside the clock


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
            accuracy = self._accuracy() if self._request.measure_accuracy else None
            self._connection.send(Turn(tuple(self._ends_s), tuple(self._new_tokens), accuracy))
            self._next_turn()

    def _next_turn(self) -> None:
        self._request: TurnRequest = self._connection.recv()
        self.is_open = self._request.num_steps > 0
        self._ends_s: list[float] = []
        self._new_tokens: list[int] = []
        self._began_s = time.perf_counter()
