"""What moving bytes between two processes costs by itself: ZeroMQ over TCP, one frame at a time."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import zmq


class Sink:
    """Receives frames on a thread and confirms each; the target of an actor."""

    def __init__(self) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REP)
        self._port: int = self._socket.bind_to_random_port("tcp://127.0.0.1")
        threading.Thread(target=self._serve, daemon=True).start()

    def address(self) -> str:
        return f"tcp://127.0.0.1:{self._port}"

    def _serve(self) -> None:
        while True:
            self._socket.recv(copy=False)
            self._socket.send(b"")


def send_seconds(address: str, sizes: Sequence[int]) -> float:
    """Seconds until frames of these many bytes arrived, one after the other."""
    frames = [np.ones(size, np.uint8).data for size in sizes]
    socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.REQ)
    socket.connect(address)
    try:
        socket.send(b"warm")
        socket.recv()
        started = time.perf_counter()
        for frame in frames:
            socket.send(frame, copy=False)
            socket.recv()
        return time.perf_counter() - started
    finally:
        socket.close(linger=0)
