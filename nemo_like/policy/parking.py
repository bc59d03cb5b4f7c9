"""Tensors that wait on the host while nobody computes with them, so that engines can have a shared device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


class HostParking:
    """Has these tensors on their device within ``in_use``, and outside of it on the host alone.

    What is moved is their memory: tensors, and views of them that others keep, stay the same objects. Outside
    of ``in_use`` they have no memory and must not be read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """From now on they are on the host."""
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
        """What is written to the tensors lasts. May be entered again inside."""
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
            torch.cuda.empty_cache()  # to where other processes can have it

    @torch.no_grad()
    def _return(self) -> None:
        for storage, held in zip(self._storages, self._on_host, strict=True):
            storage.resize_(len(held))
            _bytes_of(storage).copy_(held)


def stays_on_device() -> contextlib.AbstractContextManager[None]:
    """In place of ``HostParking.in_use`` where nothing leaves the device."""
    return contextlib.nullcontext()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
