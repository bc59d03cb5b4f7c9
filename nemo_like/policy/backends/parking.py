"""Parks tensors on the host while nothing computes with them, so that engines on the same device can use its
memory."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

# Every piece of host memory begins at a multiple of this many bytes, so that it can be viewed as any dtype.
_ALIGNMENT = 64


class HostParking:
    """Keeps tensors on their device within ``in_use``, and only on the host outside of it.

    Only the contents of their storages move: the tensors, and views of them elsewhere, stay the same objects.
    Outside of ``in_use`` the tensors have no memory and must not be read.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors to the host at once."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._storages = list({storage.data_ptr(): storage for storage in storages}.values())
        self._is_on_gpu = any(storage.is_cuda for storage in self._storages)
        sizes = [len(storage) for storage in self._storages]
        self._on_host = HostMemory(sizes, is_pinned=self._is_on_gpu)
        self._num_users = 0
        self._leave()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Have the tensors on their device within the block; values that the block writes to them are kept.

        Such blocks may be nested.
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

    def end(self) -> None:
        """Bring the tensors back to their device for good; no block may be using them."""
        self._return()
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()  # the host memory may be freed with this object

    @torch.no_grad()
    def _leave(self) -> None:
        for storage, held in zip(self._storages, self._on_host.pieces, strict=True):
            held.copy_(_bytes_of(storage), non_blocking=True)
        if self._is_on_gpu:
            torch.cuda.current_stream().synchronize()
        for storage in self._storages:
            storage.resize_(0)
        if self._is_on_gpu:
            torch.cuda.empty_cache()  # gives the memory back to the device, where other processes can use it

    @torch.no_grad()
    def _return(self) -> None:
        for storage, held in zip(self._storages, self._on_host.pieces, strict=True):
            storage.resize_(len(held))
            _bytes_of(storage).copy_(held, non_blocking=True)


class HostMemory:
    """Host memory in pieces of given sizes, which takes the sum of the sizes and no more.

    Copies between pinned memory and a GPU are several times as fast as from other memory, and run while the
    processor goes on. PyTorch's allocator of pinned memory rounds up to powers of two, so a model could take
    twice its size; here exactly the needed memory is pinned. It stays pinned while this object lives.
    """

    def __init__(self, sizes: Sequence[int], *, is_pinned: bool) -> None:
        """Allocate the memory. Raises RuntimeError when the driver cannot pin it."""
        rooms = (-(-size // _ALIGNMENT) * _ALIGNMENT for size in sizes)
        starts = list(itertools.accumulate(rooms, initial=0))
        whole = torch.empty(starts[-1], dtype=torch.uint8)
        self.pieces = [whole[start : start + size] for start, size in zip(starts, sizes, strict=False)]
        if is_pinned and len(whole):
            runtime = torch.cuda.cudart()
            torch.cuda.check_error(runtime.cudaHostRegister(whole.data_ptr(), len(whole), 0))
            unpin = weakref.finalize(self, runtime.cudaHostUnregister, whole.data_ptr())
            unpin.atexit = False  # the driver unpins what a process holds when it ends


def stays_on_device() -> contextlib.AbstractContextManager[None]:
    """Stand in for ``HostParking.in_use`` where the tensors always stay on the device."""
    return contextlib.nullcontext()


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
