"""Requests and their answers over ZeroMQ, from the thread that asks.

No event loop: a round trip is one wake-up here and one at the other end, and the thread's own. Each
thread has sockets of its own. One that gives up closes its socket, so that a late answer is never taken
for that of the next request.
"""

from __future__ import annotations

import itertools
import math
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from typing import Any, NamedTuple

import zmq

# Between processes of one node: what is sent is received while it is still in the processor's cache, in
# half the time. Between nodes the kernel finds the size that fills the line.
_NEAR_BUFFER_BYTES = 256 << 10


class GaveUp(Exception):
    """No answer: the deadline passed, or the alarm rang."""


class Request(NamedTuple):
    address: str
    frames: Sequence[Any]


class Alarm:
    """Ends all waits of a process, those to come too, once it rang."""

    def __init__(self) -> None:
        # Never read, so that it stays readable for whoever polls it.
        self._read, self._write = socket.socketpair()

    def ring(self) -> None:
        self._write.send(b"!")

    def fileno(self) -> int:
        return self._read.fileno()


class Exchange:
    """Sends requests and waits for their answers. Safe to use from several threads."""

    def __init__(self, identity: str, alarm: Alarm, node_address: str) -> None:
        """``identity`` begins the name under which the other end sees each socket."""
        self._alarm, self._node_address = alarm, node_address
        self._context = zmq.Context(io_threads=1)
        self._name = f"{identity}_{uuid.uuid4().hex[:8]}"
        self._numbers = itertools.count()
        self._of_thread = threading.local()

    def ask(self, requests: Sequence[Request], timeout_s: float) -> list[list[zmq.Frame]]:
        """The answers, in order, to requests to different addresses. Raises GaveUp."""
        for request in requests:
            self.send(request)
        return self.receive([request.address for request in requests], timeout_s)

    def send(self, request: Request) -> None:
        """Send without waiting; ``receive`` has to follow on the same thread."""
        # Not copied: the frames must stay as they are until the answer is there.
        self._socket(request.address).send_multipart(request.frames, copy=False)

    def receive(self, addresses: Sequence[str], timeout_s: float) -> list[list[zmq.Frame]]:
        """One answer from each address. Raises GaveUp, and then takes no answer from any of them later."""
        waiting = {self._socket(address): address for address in addresses}
        answers: dict[str, list[zmq.Frame]] = {}
        try:
            self._collect(waiting, answers, timeout_s)
        finally:
            for address in waiting.values():
                self._sockets.pop(address).close(linger=0)
        return [answers[address] for address in addresses]

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _collect(
        self, waiting: dict[zmq.Socket[bytes], str], answers: dict[str, list[zmq.Frame]], timeout_s: float
    ) -> None:
        """Move answers in until nothing is waited for."""
        end = time.monotonic() + timeout_s
        poller = zmq.Poller()
        poller.register(self._alarm.fileno(), zmq.POLLIN)
        for one in waiting:
            poller.register(one, zmq.POLLIN)
        while waiting:
            left_ms = math.ceil(max(0.0, end - time.monotonic()) * 1e3)
            ready = dict(poller.poll(left_ms))
            arrived = [one for one in waiting if one in ready]
            for one in arrived:
                answers[waiting.pop(one)] = one.recv_multipart(copy=False)
                poller.unregister(one)
            if not arrived and (ready or time.monotonic() >= end):
                raise GaveUp

    @property
    def _sockets(self) -> dict[str, zmq.Socket[bytes]]:
        sockets: dict[str, zmq.Socket[bytes]] = self._of_thread.__dict__.setdefault("sockets", {})
        return sockets

    def _socket(self, address: str) -> zmq.Socket[bytes]:
        connected = self._sockets.get(address)
        if connected is None:
            connected = self._context.socket(zmq.DEALER)
            connected.setsockopt(zmq.IDENTITY, f"{self._name}_{next(self._numbers)}".encode())
            connected.setsockopt(zmq.SNDHWM, 0)
            connected.setsockopt(zmq.RCVHWM, 0)
            connected.setsockopt(zmq.IPV6, "[" in address)
            if _host(address) == self._node_address:
                connected.setsockopt(zmq.SNDBUF, _NEAR_BUFFER_BYTES)
            connected.connect(address)
            self._sockets[address] = connected
        return connected


def _host(address: str) -> str:
    """Of "tcp://host:port", also where the host is an IPv6 address in brackets."""
    return address.removeprefix("tcp://").rpartition(":")[0].strip("[]")
