"""Copies tensors into the buffers of buckets, and assembles them again from there."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import ALIGNMENT_BYTES, Piece, TensorSpec

NamedTensors = Iterable[tuple[str, Tensor]]


def spec_of(name: str, value: Tensor) -> TensorSpec:
    return TensorSpec(name, _dtype_name(value.dtype), tuple(value.shape))


@functools.cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def as_announced(values: NamedTensors, announced: Sequence[TensorSpec]) -> Iterator[tuple[str, Tensor]]:
    """Yield the values unchanged, after checking that they are the announced tensors in this order.

    Raises ValueError when a name, dtype or shape differs, or when there are more or fewer values.
    """
    stream = iter(values)
    for spec in announced:
        name, value = next(stream, ("nothing", torch.empty(0)))
        if (name, _dtype_name(value.dtype), value.shape) != (spec.name, spec.dtype, spec.shape):
            raise ValueError(f"got {spec_of(name, value)} to send, announced at connect time was {spec}")
        yield name, value
    surplus = next(stream, None)
    if surplus is not None:
        raise ValueError(f"got {surplus[0]!r} to send, which was not announced at connect time")


def pack(values: NamedTensors, next_buffer: Callable[[int], Tensor]) -> Iterator[tuple[list[Piece], Tensor]]:
    """Copy the values one after the other into buffers, and yield each buffer with the pieces that lie in it.

    ``next_buffer(number)`` returns the ``number``-th buffer, [bytes] uint8 on any device; it is called when
    the buffer before is full and values remain. Of the last buffer only the filled part is yielded.
    """
    pieces: list[Piece] = []
    buffer: Tensor | None = None
    filled = room = num_buckets = 0
    for name, value in values:
        spec, flat, start = spec_of(name, value), as_bytes(value.detach()), 0
        size = len(flat)
        while True:
            if buffer is not None and filled >= room:
                yield pieces, buffer
                buffer = None
            if buffer is None:
                buffer, pieces, filled = next_buffer(num_buckets), [], 0
                room = len(buffer)
                num_buckets += 1
            part = min(size - start, room - filled)
            buffer[filled : filled + part].copy_(flat[start : start + part])
            pieces.append(Piece(spec, start, filled, part))
            filled, start = filled + part, start + part
            if start == size:
                break
        filled = -(-filled // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    if buffer is not None:
        yield pieces, buffer[:filled]


class Assembler:
    """Assembles tensors from the pieces in one bucket after the other; the tensors have memory of their
    own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._whole = torch.empty(0, dtype=torch.uint8)  # bytes of the tensor whose pieces are arriving

    def add(self, pieces: Sequence[Piece], buffer: Tensor) -> list[tuple[str, Tensor]]:
        """Copy the pieces out of the buffer, and return the tensors that are complete now.

        On a CUDA device the copies are complete once its current stream has run.
        """
        complete = []
        for piece in pieces:
            part, size = buffer[piece.offset : piece.offset + piece.num_bytes], piece.spec.num_bytes
            if piece.num_bytes == size:  # as most are
                whole = part.to(self._device, copy=True)
                complete.append((piece.spec.name, as_tensor(whole, piece.spec)))
                continue
            if piece.start == 0:
                self._whole = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._whole[piece.start : piece.start + piece.num_bytes].copy_(part)
            if piece.start + piece.num_bytes == size:
                complete.append((piece.spec.name, as_tensor(self._whole, piece.spec)))
        return complete


def view(buffer: Tensor, piece: Piece) -> Tensor:
    """Return the whole tensor that lies in the buffer, as a view of the buffer."""
    return as_tensor(buffer[piece.offset : piece.offset + piece.num_bytes], piece.spec)


def as_bytes(value: Tensor) -> Tensor:
    """Return the tensor's values in their order as [bytes] uint8; a view of the tensor where it is
    contiguous."""
    return value.contiguous().view(-1).view(torch.uint8)


def as_tensor(flat: Tensor, spec: TensorSpec) -> Tensor:
    """View [bytes] uint8 as a tensor of the dtype and shape of ``spec``."""
    return flat.view(getattr(torch, spec.dtype)).view(spec.shape)
