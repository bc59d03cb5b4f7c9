"""Writes and reads ``rollout_times.jsonl``: when each sample of the training rollouts was asked for and came.

One line per rollout, in the order in which rollouts end:

    {"step": 12, "first_group": 0, "began_s": 1764.25, "groups": [[[29, [0, 4, 12, 312]], ...], ...]}

``groups`` has the rollout's groups in the order of their prompts, each a list of its samples. A sample is the
number of its tokens, including prompt and observations, followed by its turns. A turn has four numbers: the
time at which its response was requested, the number of the response's tokens, the time at which the response
came, and the time at which the environment had answered. These times are milliseconds after ``began_s``
(seconds since 1970). A step that was repeated has several lines; the last one counts. Standard library only.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.observability.disk import append_whole, space_for
from nemo_like.observability.jsonl import skipped_lines


class TurnTimes(NamedTuple):
    """One turn of a sample, in seconds after its rollout began."""

    asked_s: float
    num_tokens: int  # of the response
    came_s: float
    judged_s: float


class SampleTimes(NamedTuple):
    """A sample's turns; ``num_tokens`` counts prompt, responses and observations."""

    num_tokens: int
    turns: tuple[TurnTimes, ...]  # none of an agent's session


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutTimes:
    """A rollout, which began at ``began_s`` seconds since 1970; ``groups[i]`` has the samples of prompt i."""

    step: int
    first_group: int
    began_s: float
    groups: tuple[tuple[SampleTimes, ...], ...]


def append_rollout_times(path: Path, times: RolloutTimes) -> None:
    """Append the line of a rollout to the file, which may be missing. Raises DiskFull or OSError."""
    line = json.dumps(
        {
            "step": times.step,
            "first_group": times.first_group,
            "began_s": round(times.began_s, 3),
            "groups": [[_as_list(sample) for sample in group] for group in times.groups],
        },
        separators=(",", ":"),
    )
    contents = line.encode() + b"\n"
    with (
        space_for(f"the times of step {times.step}", path.parent, len(contents)),
        path.open("ab", buffering=0) as file,
    ):
        append_whole(file, contents)


def read_rollout_times(path: Path, warn: Callable[[str], None] = warnings.warn) -> list[RolloutTimes]:
    """Return the rollouts of a file, sorted by step and first group; of a repeated rollout the last.

    Skips a last line that was cut short, and lines of any other form; ``warn`` gets a sentence about the
    latter. Raises FileNotFoundError, and ValueError when no line is a rollout.
    """
    found: dict[tuple[int, int], RolloutTimes] = {}
    bad: list[int] = []
    whole, _, _ = path.read_bytes().rpartition(b"\n")
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        try:
            times = _from_json(json.loads(line))
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            bad.append(number)
            continue
        found[times.step, times.first_group] = times
    if bad and not found:
        raise ValueError(f"{path}:{bad[0]} is no line of rollout times")
    if bad:
        warn(skipped_lines(path, bad, "rollout times"))
    return [found[key] for key in sorted(found)]


def _as_list(sample: SampleTimes) -> list[Any]:
    return [
        sample.num_tokens,
        *(
            [round(1000 * asked_s), num_tokens, round(1000 * came_s), round(1000 * judged_s)]
            for asked_s, num_tokens, came_s, judged_s in sample.turns
        ),
    ]


def _from_json(line: Mapping[str, Any]) -> RolloutTimes:
    return RolloutTimes(
        step=line["step"],
        first_group=line["first_group"],
        began_s=line["began_s"],
        groups=tuple(tuple(_sample(one) for one in group) for group in line["groups"]),
    )


def _sample(values: Sequence[Any]) -> SampleTimes:
    num_tokens, *turns = values
    return SampleTimes(
        num_tokens,
        tuple(
            TurnTimes(asked / 1000, count, came / 1000, judged / 1000) for asked, count, came, judged in turns
        ),
    )
