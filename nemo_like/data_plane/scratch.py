"""Memory that one put after the other uses: to fault fresh pages in takes longer than to fill them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

Join = Callable[[Sequence[np.ndarray]], np.ndarray]


class Scratch:
    """Keeps what the latest put needed. Safe to use from several threads, of which one finds it."""

    def __init__(self) -> None:
        self._free: list[np.ndarray] = []  # uint8

    @contextmanager
    def joining(self) -> Iterator[Join]:
        """A function that puts arrays one after the other, like ``np.concatenate``; its results are good
        within the block. Where that raises, somebody may still read them: their memory is not used again."""
        free, self._free = self._free, []
        taken: list[np.ndarray] = []

        def join(pieces: Sequence[np.ndarray]) -> np.ndarray:
            shape = (sum(len(piece) for piece in pieces), *pieces[0].shape[1:])
            num_bytes = math.prod(shape) * pieces[0].itemsize
            fitting = min(
                (index for index, buffer in enumerate(free) if buffer.nbytes >= num_bytes),
                key=lambda index: free[index].nbytes,
                default=None,
            )
            buffer = np.empty(num_bytes, np.uint8) if fitting is None else free.pop(fitting)
            taken.append(buffer)
            return np.concatenate(pieces, out=buffer[:num_bytes].view(pieces[0].dtype).reshape(shape))

        yield join
        self._free = taken
