"""Addition of two numbers of a fixed number of digits: the tiny, verifiable task.

Operands and answer are zero-padded and written with the last digit first: ``12 + 34`` is the prompt
``21+43=`` with the answer ``640``. Each digit then depends only on what was written before it, so that a tiny
model can learn the task. One pair in ten is held out for validation, in both orders.
"""

from __future__ import annotations

import random
import re
import zlib

from nemo_like.data.interface import Split, TaskPrompt

_MAX_DIGITS = 3
_ORDER_SEED = 0


def is_held_out(x: int, y: int) -> bool:
    """Return whether ``x + y`` belongs to validation; ``y + x`` then does too, since it has the same answer.

    A hash of the text spreads the held-out pairs evenly.
    """
    return zlib.crc32(f"{min(x, y)}+{max(x, y)}".encode()) % 10 == 0


def addition_prompt(x: int, y: int, digits: int) -> str:
    return f"{_reversed_digits(x, digits)}+{_reversed_digits(y, digits)}="


def addition_answer(x: int, y: int, digits: int) -> str:
    """Return the sum, reversed and zero-padded to one digit more than the operands have, for the carry."""
    return _reversed_digits(x + y, digits + 1)


def as_written(text: str) -> str:
    """Return the text with its numbers as people write them: ``12+34=`` for ``21+43=``."""
    return re.sub(r"[0-9]+", lambda number: str(int(number[0][::-1])), text)


class ArithmeticDataset:
    """All pairs of one split, in one fixed shuffled order, so that the first n of them are a fair sample."""

    def __init__(self, digits: int, split: Split) -> None:
        if not 1 <= digits <= _MAX_DIGITS:
            raise ValueError(f"data.*.digits={digits} must be from 1 to {_MAX_DIGITS}")
        self._digits = digits
        self._base = 10**digits
        held_out = split == "validation"
        self._pairs = [
            x * self._base + y
            for x in range(self._base)
            for y in range(self._base)
            if is_held_out(x, y) == held_out
        ]
        random.Random(_ORDER_SEED).shuffle(self._pairs)

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> TaskPrompt:
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} in an arithmetic dataset of {len(self)}")
        x, y = divmod(self._pairs[index], self._base)
        prompt, answer = addition_prompt(x, y, self._digits), addition_answer(x, y, self._digits)
        return TaskPrompt(prompt, answer, as_written=as_written)


def _reversed_digits(value: int, width: int) -> str:
    return str(value).zfill(width)[::-1]
