"""Tags computed from responses and rewards: which answers agree, and the reward's components.

Pure: nothing here waits or calls another process.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence

from nemo_like.batch.tags import reward_component
from nemo_like.environments.latex_quantities import plain_quantity

# How tasks commonly ask policies to mark the answer; in a response, the last mark counts.
_MARKS = (
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"<answer>(.*?)</answer>", re.DOTALL),
    re.compile(r"####\s*(.+)"),
)


def final_answer(response: str) -> str:
    """Return the marked answer (``\\boxed{}``, ``<answer>``, ``####``), or else the whole response.

    White space is reduced to single spaces, and a number whose unit LaTeX typesets becomes plain text.
    """
    for mark in _MARKS:
        if found := mark.findall(response):
            response = found[-1]
            break
    return plain_quantity(" ".join(response.split()))


def answer_ids(responses: Sequence[str]) -> list[int]:
    """Number the responses so that equal final answers have equal numbers, from 0 in order of appearance."""
    numbers: dict[str, int] = {}
    return [numbers.setdefault(final_answer(response), len(numbers)) for response in responses]


def component_tags(
    names: Iterable[str], rewards: Sequence[Mapping[str, float | None]]
) -> dict[str, list[float]]:
    """Return a tag for each reward component in ``names``; ``rewards[i]`` has the components of sample i.

    A component that a sample lacks is 0, and a component that abstains is NaN. Raises ValueError for a name
    that no sample has, unless all samples have no components at all.
    """
    there = sorted({name for components in rewards for name in components})
    for name in names:
        if there and name not in there:
            raise ValueError(
                f"grpo.adv_estimator.reward_weights.{name}: no environment gives a component {name!r}; "
                f"there are {', '.join(there)}"
            )
    return {
        reward_component(name).name: [
            math.nan if (value := components.get(name, 0.0)) is None else float(value)
            for components in rewards
        ]
        for name in names
    }
