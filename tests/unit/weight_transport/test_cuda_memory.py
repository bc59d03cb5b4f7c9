from __future__ import annotations

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from nemo_like.weight_transport.cuda_memory import Ticket

# As torch.multiprocessing.reductions.reduce_tensor makes them, in the order of rebuild_cuda_tensor.
ARGUMENTS = {
    "tensor_cls": torch.Tensor,
    "tensor_size": torch.Size([64]),
    "tensor_stride": (1,),
    "tensor_offset": 0,
    "storage_cls": torch.storage.TypedStorage,
    "dtype": torch.uint8,
    "storage_device": 5,
    "storage_handle": b"\x01memory",
    "storage_size_bytes": 64,
    "storage_offset_bytes": 512,
    "requires_grad": False,
    "ref_counter_handle": b"/counter",
    "ref_counter_offset": 3,
    "event_handle": b"event",
    "event_sync_required": True,
}


def test_the_arguments_are_those_that_torch_rebuilds_a_tensor_from() -> None:
    names = rebuild_cuda_tensor.__code__.co_varnames[: rebuild_cuda_tensor.__code__.co_argcount]
    assert tuple(ARGUMENTS) == names


def test_a_ticket_arrives_as_it_was_sent() -> None:
    ticket = Ticket("GPU-1f", tuple(ARGUMENTS.values()))
    assert Ticket.from_bytes(ticket.to_bytes()) == ticket


def test_a_reader_maps_the_memory_on_a_device_of_its_own_numbering_and_opens_no_event() -> None:
    ticket = Ticket("GPU-1f", tuple(ARGUMENTS.values()))
    found = dict(zip(ARGUMENTS, ticket.arguments_on(2), strict=True))
    assert found == {**ARGUMENTS, "storage_device": 2, "event_sync_required": False}
