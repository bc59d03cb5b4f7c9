"""What a response finally says, so that answers can be compared. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

# How tasks commonly ask for the answer to be marked; the last mark counts.
_MARKS = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"####\s*(.+)"),
)


def final_answer(response: str) -> str:
    """The marked answer (``\\boxed{}``, ``<answer>``, ``####``), or else the whole response; white space
    is made uniform."""
    for mark in _MARKS:
        if found := mark.findall(response):
            response = found[-1]
            break
    return " ".join(response.split())


def answer_ids(responses: Sequence[str]) -> list[int]:
    """Equal numbers for responses with equal final answers, counted from 0 in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(final_answer(response), len(numbers)) for response in responses]
