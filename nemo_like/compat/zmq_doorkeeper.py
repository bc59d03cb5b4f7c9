"""Cuts off peers that send a lot to a ZeroMQ server before they have shown that they know the secret.

ZeroMQ stores whatever a peer sends as one frame until the frame is whole, even before it has asked for a
password. Its limit on a frame's size would also hold for peers that know the password. So a thread looks, for
each new connection, at how many bytes the server has received from the peer and sent to it: a peer that is
let in gets an answer besides ZeroMQ's greeting. Between two looks a stranger can send as much as the network
brings in that time.

Undocumented part: ``tcpi_bytes_acked`` and ``tcpi_bytes_received`` of Linux, read on the connections of pyzmq
27.3.0, whose monitor gives their descriptors. ZeroMQ has no limit on what a peer may send before its
handshake. This module can go with a ZeroMQ that has one.
"""

from __future__ import annotations

import itertools
import socket
import struct
import threading
import time
from contextlib import suppress
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

# The bytes that every peer is sent: the greeting of ZMTP 3 (RFC 23), and one byte that the kernel counts for
# a connection's beginning. A peer that is let in gets at least ten more, those of WELCOME.
_GREETING_BYTES = 64 + 1
# What a peer that has not been let in may send. A handshake, PLAIN or CURVE, takes less than 500 bytes.
_MAX_BYTES = 64 << 10
# With more connections than this that have not been let in, the oldest is cut off.
_MAX_STRANGERS = 1024
_PERIOD_MS = 20
# Where struct tcp_info of <linux/tcp.h> has tcpi_bytes_acked and tcpi_bytes_received.
_BYTES = struct.Struct("=120xQQ")

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_numbers = itertools.count()


def keep_door(server: zmq.Socket[Any]) -> None:
    """Start to watch the connections of a server that is not bound yet, until the server is closed."""
    address = f"inproc://doorkeeper-{id(server):x}-{next(_numbers)}"
    server.monitor(address, _EVENTS)
    # A plain socket, whatever kind of context the server has.
    events: zmq.Socket[bytes] = zmq.Context.shadow(server.context.underlying).socket(zmq.PAIR)
    events.linger = 0
    events.connect(address)
    threading.Thread(target=_keep, args=(events,), name="zmq-doorkeeper", daemon=True).start()


def _keep(events: zmq.Socket[bytes]) -> None:
    strangers: dict[int, None] = {}  # descriptors of peers that have not been let in, oldest first
    next_look_s = 0.0
    # The context is closed before the server in a process that ends.
    with suppress(zmq.ContextTerminated), events:
        while True:
            if events.poll(_PERIOD_MS if strangers else None):
                event = recv_monitor_message(events)
                if event["event"] == zmq.EVENT_MONITOR_STOPPED:
                    return
                strangers.pop(event["value"], None)
                if event["event"] == zmq.EVENT_ACCEPTED:
                    strangers[event["value"]] = None
            if time.monotonic() < next_look_s:
                continue  # a stream of new connections must not delay the next look
            next_look_s = time.monotonic() + _PERIOD_MS / 1000
            for descriptor in list(strangers):
                if not _is_stranger(descriptor, is_one_too_many=len(strangers) > _MAX_STRANGERS):
                    del strangers[descriptor]


def _is_stranger(descriptor: int, *, is_one_too_many: bool) -> bool:
    """Return whether the peer has not been let in yet; cut it off if it has sent too much."""
    connection = None
    try:
        connection = socket.socket(fileno=descriptor)
        acknowledged, received = _BYTES.unpack(
            connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES.size)
        )
        if acknowledged > _GREETING_BYTES:
            return False
        if received > _MAX_BYTES or is_one_too_many:
            connection.shutdown(socket.SHUT_RDWR)
            return False
        return True
    except (OSError, struct.error):
        return False  # closed meanwhile; the descriptor may be another file's now
    finally:
        if connection is not None:
            connection.detach()  # ZeroMQ owns the descriptor
