"""Describes named tensors that are sent as one stream of bytes, cut into buckets of bounded size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# A tensor begins at a multiple of this in its bucket, so that any dtype can be viewed in place.
ALIGNMENT_BYTES = 64

_ITEM_BYTES = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Name, dtype and shape of one tensor that is sent."""

    name: str
    dtype: str  # torch's name, for example "float32"
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The tensor's size. Raises ValueError for a dtype that cannot be sent."""
        if self.dtype not in _ITEM_BYTES:
            raise ValueError(
                f"tensor {self.name!r}: dtype={self.dtype!r} is not one of {sorted(_ITEM_BYTES)}"
            )
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class SentAdapter:
    """Describes low-rank adapters that are sent in place of a whole model."""

    config: Mapping[str, Any]  # peft's adapter_config.json
    whole_bytes: int  # size of the sender's whole weights, which are not sent


def check_names(tensors: Sequence[TensorSpec]) -> None:
    """Raise ValueError when two tensors have the same name."""
    twice = [name for name, count in Counter(spec.name for spec in tensors).items() if count > 1]
    if twice:
        raise ValueError(f"tensors named twice: {sorted(twice)}")


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive bytes of a tensor that lie in one bucket. A tensor larger than a bucket has several
    pieces."""

    spec: TensorSpec
    start: int  # where these bytes begin in the tensor
    offset: int  # where these bytes begin in the bucket
    num_bytes: int


def to_lists(pieces: Sequence[Piece]) -> list[list[Any]]:
    """Return the pieces as lists of numbers and strings, for a message in JSON.

    Each list has one field of all pieces. A list per piece would make thousands of short lists, over which
    Python's garbage collector would run for longer than it takes to read the message.
    """
    return [
        [piece.spec.name for piece in pieces],
        [piece.spec.dtype for piece in pieces],
        [" ".join(map(str, piece.spec.shape)) for piece in pieces],
        [piece.start for piece in pieces],
        [piece.offset for piece in pieces],
        [piece.num_bytes for piece in pieces],
    ]


def from_lists(lists: Sequence[Sequence[Any]]) -> list[Piece]:
    """Return the pieces from the lists that ``to_lists`` made of them."""
    names, dtypes, described, *numbers = lists
    shapes = {text: tuple(map(int, text.split())) for text in set(described)}
    specs = (
        TensorSpec(name, dtype, shapes[text])
        for name, dtype, text in zip(names, dtypes, described, strict=True)
    )
    return [
        Piece(spec, start, offset, num_bytes)
        for spec, start, offset, num_bytes in zip(specs, *numbers, strict=True)
    ]
