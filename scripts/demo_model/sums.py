"""The task of the agent: sums of three numbers, and conversations that solve them with a calculator."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HELD_OUT_SHARE = 10  # one problem in so many is held out


@dataclass(frozen=True, slots=True)
class Sum:
    """A problem such as 12+34+56."""

    terms: tuple[int, int, int]

    @property
    def prompt(self) -> str:
        return "+".join(map(str, self.terms))

    @property
    def answer(self) -> str:
        return str(sum(self.terms))

    @property
    def is_held_out(self) -> bool:
        """Whether the problem is held out; the same terms in another order then are too."""
        terms = "+".join(map(str, sorted(self.terms)))
        return zlib.crc32(terms.encode()) % _HELD_OUT_SHARE == 0

    def solution(self) -> list[dict[str, Any]]:
        """Return the messages of a harness that has the first two terms added, then the third, and takes the
        answer."""
        first, second, third = self.terms
        partial = first + second
        return [
            {"role": "user", "content": self.prompt},
            _call("add", a=first, b=second),
            {"role": "tool", "content": str(partial)},
            _call("add", a=partial, b=third),
            {"role": "tool", "content": self.answer},
            _call("answer", value=partial + third),
        ]


def sums(rng: random.Random, *, held_out: bool) -> Iterator[Sum]:
    """Yield random problems without end: those that are held out, or all others."""
    while True:
        problem = Sum((rng.randrange(10, 100), rng.randrange(10, 100), rng.randrange(10, 100)))
        if problem.is_held_out == held_out:
            yield problem


def write_records(directory: Path, name: str, count: int, *, held_out: bool) -> None:
    """Write ``count`` different problems to ``directory/name.jsonl``."""
    problems: dict[str, Sum] = {}
    for problem in sums(random.Random(count), held_out=held_out):
        problems[problem.prompt] = problem
        if len(problems) == count:
            break
    lines = [json.dumps({"prompt": one.prompt, "answer": one.answer}) for one in problems.values()]
    (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _call(name: str, **arguments: int) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": function}]}
