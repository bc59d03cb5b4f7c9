from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import pytest

from nemo_like.batch.columnar import Columnar


@dataclass(frozen=True, slots=True)
class Point:
    x: int
    labels: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Named(Point):
    name: str = ""


@dataclass(frozen=True, slots=True)
class Single:
    value: str


@pytest.mark.parametrize(
    "records",
    [
        [],
        [Point(1), Point(2, {"a": 0.5})],
        [Single("a"), Single("b")],
        [Point(1), Named(2, name="b"), Single("c")],
    ],
    ids=["none", "one class", "one field", "several classes"],
)
def test_records_arrive_as_they_were_in_a_plain_list(records: list[object]) -> None:
    arrived = pickle.loads(pickle.dumps(Columnar(records)))
    assert type(arrived) is list
    assert arrived == records
    assert list(map(type, arrived)) == list(map(type, records))


def test_columns_are_smaller_than_records() -> None:
    records = [Point(index, {"a": 0.5}) for index in range(100)]
    assert len(pickle.dumps(Columnar(records))) < 0.8 * len(pickle.dumps(records))
