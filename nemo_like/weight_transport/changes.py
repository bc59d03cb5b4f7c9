"""Sends only what changed in the weights since the previous transfer, exactly.

    sender                                          receiver
      compare each tensor with what was sent
      yield for each tensor one of
        nothing, when no bit changed ───────────────▶ keep the held copy
        the indexes and new values that changed ────▶ put the values into the held copy
        the whole tensor, when that is less to send ▶ replace the held copy

Both sides hold a copy of all tensors in the dtype that is sent. An index takes four bytes, so a bfloat16
tensor is sent whole when a third of it changed, and a float32 tensor when half of it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import TensorSpec

# After a tensor's name; names of Hugging Face contain no colons.
_INDEXES, _VALUES = "::indexes", "::values"
_INDEX = torch.int32
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Named = tuple[str, Tensor]


class ChangeEncoder:
    """Encodes the tensors of each transfer as changes, at the sender."""

    def __init__(self) -> None:
        self._sent: dict[str, Tensor] = {}  # the values' bits on the host, flat
        self.num_changed = self.num_values = 0  # numbers of the latest ``encode``

    def forget(self) -> None:
        """Forget what was sent, so that the next transfer sends every tensor whole; for receivers that may
        not hold it."""
        self._sent.clear()

    @torch.no_grad()
    def encode(self, values: Iterator[Named]) -> Iterator[Named]:
        """Yield what changed in ``values`` since the previous call. The receivers must decode all of it."""
        self.num_changed = self.num_values = 0
        for name, value in values:
            bits = _bits(value.detach())
            before = self._sent.get(name)
            indexes = None if before is None else (bits != before.to(bits.device)).nonzero().view(-1)
            self.num_values += len(bits)
            self.num_changed += len(bits) if indexes is None else len(indexes)
            if before is None or indexes is None:
                self._sent[name] = bits.to("cpu", copy=True)
                yield name, value
            elif _is_less(len(indexes), bits):
                before[indexes.to("cpu")] = bits[indexes].to("cpu")
                if len(indexes):
                    yield name + _INDEXES, indexes.to(_INDEX)
                    yield name + _VALUES, value.detach().reshape(-1)[indexes]
            else:
                before.copy_(bits)
                yield name, value


class ChangeDecoder:
    """Restores whole tensors from changes, at a receiver, for one sender that sends ``tensors`` in this
    order."""

    def __init__(self, tensors: Sequence[TensorSpec]) -> None:
        self._names = [spec.name for spec in tensors]
        self._positions = {name: position for position, name in enumerate(self._names)}
        self._held: dict[str, Tensor] = {}  # on the host

    def decode(self, parts: Iterator[list[Named]]) -> Iterator[list[Named]]:
        """Yield every tensor of the sender, whole, from what its ``ChangeEncoder`` yielded.

        The yielded tensors are the held copies, so the next transfer changes them. Raises RuntimeError when a
        tensor that is not held came in part or not at all.
        """
        num_yielded = 0
        indexes = torch.empty(0, dtype=_INDEX)
        for part in parts:
            whole: list[Named] = []
            for name, tensor in part:
                if name.endswith(_INDEXES):
                    indexes = tensor
                    continue
                plain_name = name.removesuffix(_VALUES)
                position = self._positions[plain_name]
                whole += self._kept(num_yielded, position)
                if name.endswith(_VALUES):
                    self._change(plain_name, indexes, tensor)
                else:
                    self._keep(name, tensor)
                whole += self._kept(position, position + 1)
                num_yielded = position + 1
            yield whole
        yield self._kept(num_yielded, len(self._names))

    def _kept(self, start: int, stop: int) -> list[Named]:
        try:
            return [(name, self._held[name]) for name in self._names[start:stop]]
        except KeyError as error:
            raise RuntimeError(
                f"{error.args[0]!r} was never sent whole, so what changed of it is no use"
            ) from None

    def _keep(self, name: str, tensor: Tensor) -> None:
        if name in self._held:
            self._held[name].copy_(tensor)
        else:
            self._held[name] = tensor.to("cpu", copy=True)

    def _change(self, name: str, indexes: Tensor, values: Tensor) -> None:
        [(_, held)] = self._kept(self._positions[name], self._positions[name] + 1)
        held.view(-1)[indexes.to("cpu").long()] = values.to("cpu")


def _is_less(num_changed: int, bits: Tensor) -> bool:
    """Return whether the indexes and values of the changes take less to send than the whole tensor, and
    indexes fit into int32."""
    item_bytes = bits.element_size()
    is_addressable = len(bits) <= torch.iinfo(_INDEX).max
    return is_addressable and num_changed * (_INDEX.itemsize + item_bytes) < len(bits) * item_bytes


def _bits(value: Tensor) -> Tensor:
    """View the values as flat integers of the same size, since floats of different bits can be equal (0 and
    -0) and equal bits unequal (NaN)."""
    return value.reshape(-1).view(_INTEGERS[value.element_size()])
