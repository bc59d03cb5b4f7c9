"""Copying tensors into a bucket's buffer, and viewing them there again."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import Bucket, Slot, TensorSpec


def pack(bucket: Bucket, values: Iterator[tuple[str, Tensor]], buffer: Tensor) -> None:
    """Take the next values, which must be the bucket's tensors in their order, and copy each to its slot.

    ``buffer``: at least [bucket.num_bytes] uint8, on any device. Raises ValueError when a name, dtype
    or shape differs from the slot's.
    """
    for slot in bucket.slots:
        name, value = next(values, ("nothing", torch.empty(0)))
        found = TensorSpec(name, str(value.dtype).removeprefix("torch."), tuple(value.shape))
        if found != slot.spec:
            raise ValueError(f"got {found} to send, announced at connect time was {slot.spec}")
        view(buffer, slot).copy_(value.detach())


def check_exhausted(values: Iterator[tuple[str, Tensor]]) -> None:
    """Raise ValueError when there is another value to send."""
    surplus = next(values, None)
    if surplus is not None:
        raise ValueError(f"got {surplus[0]!r} to send, which was not announced at connect time")


def view(buffer: Tensor, slot: Slot) -> Tensor:
    """Return the slot's tensor as a view of the buffer."""
    spec = slot.spec
    part = buffer[slot.offset : slot.offset + spec.num_bytes]
    return part.view(getattr(torch, spec.dtype)).view(spec.shape)
