"""Records whose columns do not fit are found when they are read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from nemo_like.configuration import Config
from nemo_like.data.datasets import Sources
from nemo_like.data.interface import SourceReport, TaskPrompt
from nemo_like.rollout.start_checks import check_records

Demo = Callable[..., Config]


def lengths(examples: Sequence[TaskPrompt]) -> list[int]:
    return [len(example.prompt) for example in examples]


def read(*values: Any) -> Sources:
    """A source of one sum, and one with a problem for each of these columns."""
    problems = [TaskPrompt("1+1=", "2")]
    problems += [TaskPrompt(f"p{number}", "", columns=columns) for number, columns in enumerate(values)]
    sizes = {"a": 1, "b": len(values)}
    reports = tuple(
        SourceReport(name=name, num_prompts=n, num_too_long=0, digest="") for name, n in sizes.items()
    )
    return Sources(problems, reports)  # type: ignore[arg-type]


def test_every_record_of_a_source_with_columns_is_looked_at(demo: Demo) -> None:
    columns = "{level: int8, weights: per_token float32}"
    sources = f"data.train=[{{}}, {{kind: jsonl, name: b, path: none.jsonl, columns: {columns}}}]"
    section = demo(sources).data.train
    good = {"level": 1, "weights": [0.5, 1]}
    check_records(section, read(good, good), lengths)
    for bad, problem in (
        ({**good, "level": None}, "b: the problem with the prompt 'p1' cannot be used: column 'level'"),
        ({**good, "weights": [1]}, r"has shape \[1\], where \[2\] is declared for 2 tokens"),
        ({**good, "weights": [float("nan"), 1]}, "has values that are not finite"),
    ):
        with pytest.raises(ValueError, match=problem):
            check_records(section, read(good, bad), lengths)
