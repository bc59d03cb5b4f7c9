"""Memory of a CUDA device that processes of the same node map, through CUDA's inter-process handles.

    owner                                       readers
      buffer of one version, written to
      a ticket for each reader ────────────────▶ map it, read it where it lies
      lets go of it                              let go of it: the last one frees the memory

A ticket is good for one reader, since PyTorch counts those that are out: memory that a ticket is out for
stays, also after its owner has let go of it. A reader on another device than the buffer's reads it over
peer access (NVLink, PCIe); where there is none, mapping it fails.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

_DEVICE_PLACE = list(inspect.signature(rebuild_cuda_tensor).parameters).index("storage_device")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one reader needs."""

    device_uuid: str  # where the memory is; the numbers of devices differ between processes
    arguments: tuple[Any, ...]  # of torch's rebuild_cuda_tensor

    def to_bytes(self) -> bytes:
        return pickle.dumps((self.device_uuid, self.arguments))

    @classmethod
    def from_bytes(cls, message: bytes) -> Ticket:
        """Of this user's own sender: what it holds is trusted."""
        return cls(*pickle.loads(message))

    def arguments_on(self, device_index: int) -> Sequence[Any]:
        """For a process that maps the memory on this device of its own."""
        arguments = list(self.arguments)
        arguments[_DEVICE_PLACE] = device_index
        return arguments


class CudaMemory:
    """The owner's: memory for one version at a time, none in between."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self._num_bytes, self._device = num_bytes, device
        self._buffer: Tensor | None = None

    def begin(self) -> Tensor:
        """[bytes] uint8, to write a version to."""
        self.release()
        self._buffer = torch.empty(self._num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer

    def ticket(self) -> bytes:
        """For one more reader of what is written."""
        if self._buffer is None:
            raise RuntimeError("no version was begun, so there is no memory to give a ticket for")
        torch.cuda.synchronize(self._device)  # a reader's stream does not wait for ours
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        return Ticket(uuid, reduce_tensor(self._buffer)[1]).to_bytes()

    def release(self) -> None:
        """Safe to call twice."""
        self._buffer = None
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()  # what readers have let go of, to where other processes can have it


def map_ticket(message: bytes, device: torch.device) -> Tensor:
    """[bytes] uint8 on this device. Raises RuntimeError where the device cannot reach the memory."""
    ticket = Ticket.from_bytes(message)
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return rebuild_cuda_tensor(*ticket.arguments_on(index))
    except RuntimeError as error:
        own = torch.cuda.get_device_properties(index).uuid
        raise RuntimeError(
            f"GPU {own} cannot map memory of GPU {ticket.device_uuid}; engines that share GPUs with the "
            f"trainer need peer access between them: {error}"
        ) from error
