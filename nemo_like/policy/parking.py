"""Parking of tensors on the host while nothing computes with them, so that engines on the same device can use
its memory."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class HostParking:
    """Keeps tensors on their device within ``in_use``, and only on the host outside of it.

    The contents of their storages are moved: the tensors, and views of them that others keep, stay the same
    objects. Outside of ``in_use`` the tensors have no memory and must not be read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors to the host at once."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._on_host = [
            torch.empty(len(storage), dtype=torch.uint8, pin_memory=storage.is_cuda)
            for storage in self._storages
        ]
        self._num_users = 0
        self._leave()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the tensors on their device within the block; what the block writes to them is kept.

        The block may be entered again inside itself.
        """
        if not self._num_users:
            self._return()
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            if not self._num_users:
                self._leave()

    @torch.no_grad()
    def _leave(self) -> None:
        for storage, held in zip(self._storages, self._on_host, strict=True):
            held.copy_(_bytes_of(storage))
            storage.resize_(0)
        if any(storage.is_cuda for storage in self._storages):
            torch.cuda.empty_cache()  # gives the memory back to the device, where other processes can use it

    @torch.no_grad()
    def _return(self) -> None:
        for storage, held in zip(self._storages, self._on_host, strict=True):
            storage.resize_(len(held))
            _bytes_of(storage).copy_(held)


def stays_on_device() -> contextlib.AbstractContextManager[None]:
    """Stand in for ``HostParking.in_use`` where the tensors always stay on the device."""
    return contextlib.nullcontext()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
