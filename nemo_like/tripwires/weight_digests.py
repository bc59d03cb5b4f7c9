"""Digests of weights, which differ when one bit differs or two values change places.

A tensor's bytes are read as 64-bit words w_i. The sum of w_i m_i modulo 2^64, with odd multipliers m_i that
depend on the position i, runs on the tensor's device in pieces of two MiB. A hash of all sums with the
tensors' names, dtypes and shapes is the digest.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

_PIECE_WORDS = 1 << 18
_WORD_BYTES = 8
# The digests of all pipeline stages are added as float64, which is exact below 2^53.
_DIGEST_BITS = 47


class WeightsDigest:
    """Computes the digest of named tensors, whatever their order; ``value`` is below 2^47."""

    def __init__(self) -> None:
        self._sums: list[tuple[str, Tensor]] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Take a tensor's present values into the digest; nothing is copied to the host yet."""
        described = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        self._sums.append((described, word_sum(tensor)))

    def add_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take all these named tensors into the digest."""
        for name, tensor in tensors:
            self.add(name, tensor)

    def watching(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the named tensors unchanged, and take each of them into the digest."""
        for name, tensor in tensors:
            self.add(name, tensor)
            yield name, tensor

    def by_name(self) -> dict[str, int]:
        """Return the sum of each tensor's words, as ``word_sum`` has it."""
        return {described.split(" ", 1)[0]: int(value) for described, value in self._sums}

    def value(self) -> int:
        """Return the digest of all tensors that were taken in."""
        if not self._sums:
            return 0
        sums = torch.stack([value for _, value in self._sums]).tolist()
        lines = sorted(f"{name} {value}" for (name, _), value in zip(self._sums, sums, strict=True))
        hashed = hashlib.blake2b("\n".join(lines).encode(), digest_size=8).digest()
        return int.from_bytes(hashed, "big") >> (64 - _DIGEST_BITS)


@torch.no_grad()
def word_sum(tensor: Tensor) -> Tensor:
    """Return the sum of a tensor's 64-bit words times their multipliers, modulo 2^64, as an int64 scalar.

    The words hold the values in their order, whatever the strides; the last word is filled up with 0.
    """
    words, multipliers = _words(tensor.detach()), _multipliers(tensor.device)
    if len(words) <= _PIECE_WORDS:
        return _product(words, multipliers)
    pieces = [
        _product(piece, multipliers) * (2 * number + 1)
        for number, piece in enumerate(words.split(_PIECE_WORDS))
    ]
    return torch.stack(pieces).sum()


def _product(words: Tensor, multipliers: Tensor) -> Tensor:
    multipliers = multipliers[: len(words)]
    # On the CPU alone torch has the product of integers as one kernel, which is faster.
    return words.dot(multipliers) if words.device.type == "cpu" else (words * multipliers).sum()


def _words(tensor: Tensor) -> Tensor:
    flat = tensor.reshape(-1)
    item = flat.element_size()
    if flat.numel() * item % _WORD_BYTES:
        values = flat.contiguous().view(torch.uint8)
        flat = torch.cat((values, values.new_zeros(-len(values) % _WORD_BYTES)))
    elif flat.storage_offset() * item % _WORD_BYTES:
        flat = flat.clone()
    return flat.view(torch.int64)


@functools.cache
def _multipliers(device: torch.device) -> Tensor:
    """Return odd numbers that look random, one for each word of a piece, int64: a Weyl sequence, mixed as in
    splitmix64."""
    mixed = torch.arange(1, _PIECE_WORDS + 1, dtype=torch.int64, device=device) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 30)) * -4658895280553007687
    mixed = (mixed ^ (mixed >> 27)) * -7723592293110705685
    return mixed | 1
