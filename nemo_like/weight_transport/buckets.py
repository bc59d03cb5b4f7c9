"""The plan by which tensors are cut into broadcast buckets; sender and receivers each derive the same one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Offsets within a bucket are multiples of this, so that any dtype can be viewed in place.
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
class Slot:
    """A tensor's place in a bucket."""

    spec: TensorSpec
    offset: int  # bytes


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors that travel in one broadcast."""

    slots: tuple[Slot, ...]
    num_bytes: int


def plan_buckets(tensors: Sequence[TensorSpec], bucket_bytes: int) -> list[Bucket]:
    """Cut the tensors, in order, into buckets of at most ``bucket_bytes``.

    A tensor that is larger gets a bucket of its own. Raises ValueError when a name occurs twice.
    """
    names = [spec.name for spec in tensors]
    if len(set(names)) != len(names):
        raise ValueError(f"tensors named twice: {sorted({name for name in names if names.count(name) > 1})}")
    buckets: list[Bucket] = []
    slots: list[Slot] = []
    filled = 0
    for spec in tensors:
        size = -(-spec.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if slots and filled + size > bucket_bytes:
            buckets.append(Bucket(tuple(slots), filled))
            slots, filled = [], 0
        slots.append(Slot(spec, filled))
        filled += size
    if slots:
        buckets.append(Bucket(tuple(slots), filled))
    return buckets
