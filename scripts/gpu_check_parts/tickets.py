#!/usr/bin/env python
"""Whether another process on the same GPU opens a ticket for this one's memory: PyTorch's own, with the CUDA
event that it has the reader wait for, and this project's, of which no event is opened.

On the CPU PyTorch's own tickets alone, for memory of the host. Prints a JSON object per kind of ticket.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
import torch.multiprocessing  # makes pickles of tensors tickets

from nemo_like.weight_transport.cuda_memory import make_ticket, map_ticket

NUM_BYTES = 64 << 20
TIMEOUT_S = 60.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cpu", "cuda"], required=True)
    device = parser.parse_args().device
    kinds: dict[str, Callable[[torch.Tensor], bytes]] = {"with_event": own_ticket_of_torch}
    if device == "cuda":
        kinds["without_event"] = make_ticket
    is_bad = False
    for kind, make in kinds.items():
        found = opened(kind, make, device)
        print(json.dumps({kind: found}), flush=True)
        is_bad = is_bad or "error" in found
    return int(is_bad)


def own_ticket_of_torch(memory: torch.Tensor) -> bytes:
    return bytes(ForkingPickler.dumps(memory))


def opened(kind: str, make: Callable[[torch.Tensor], bytes], device: str) -> dict[str, Any]:
    """Return how another process fared with such a ticket, and how long it took to open it."""
    memory = torch.arange(NUM_BYTES // 8, device=device)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=read, args=(kind, device, theirs), daemon=True)
    reader.start()
    theirs.close()  # so that the end of the reader is noticed
    try:
        ours.send(make(memory))
        if not ours.poll(TIMEOUT_S):
            return {"error": f"the reader gave no answer within {TIMEOUT_S:g} s"}
        found: dict[str, Any] = ours.recv()
    except EOFError:
        return {"error": "the reader ended without an answer"}
    finally:
        ours.close()
        reader.join(TIMEOUT_S)
    is_same = found.pop("sum", None) == int(memory.sum())
    return (
        found if "error" in found or is_same else {"error": "what the reader found is not what was written"}
    )


def read(kind: str, device: str, connection: Connection) -> None:
    """Open one ticket, and answer with the sum of what is there."""
    ticket = connection.recv()
    try:
        if device == "cuda":
            torch.cuda.init()
        started = time.perf_counter()
        if kind == "without_event":
            memory = map_ticket(ticket, torch.device(device)).view(torch.int64)
        else:
            memory = ForkingPickler.loads(ticket)
        connection.send({"seconds": time.perf_counter() - started, "sum": int(memory.sum())})
    except Exception as error:
        connection.send({"error": f"{type(error).__name__}: {error}"[:300]})
    connection.poll(TIMEOUT_S)  # until the owner closes its end, the memory must stay mapped


if __name__ == "__main__":
    sys.exit(main())
