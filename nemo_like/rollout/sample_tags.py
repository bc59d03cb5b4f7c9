"""What a response finally says, so that answers can be compared. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from nemo_like.batch.tags import reward_component

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


def component_tags(names: Iterable[str], rewards: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """One tag per name; ``rewards[i]`` are sample i's components. What a sample lacks is 0.

    Raises ValueError for a name that no sample has, as long as any has components at all.
    """
    there = sorted({name for components in rewards for name in components})
    for name in names:
        if there and name not in there:
            raise ValueError(
                f"grpo.adv_estimator.reward_weights.{name}: no environment gives a component {name!r}; "
                f"there are {', '.join(there)}"
            )
    return {
        reward_component(name).name: [float(components.get(name, 0.0)) for components in rewards]
        for name in names
    }
