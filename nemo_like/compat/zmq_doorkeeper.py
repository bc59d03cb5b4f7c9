"""Cuts off peers that send a lot to a ZeroMQ server before they have shown that they know the secret.

ZeroMQ keeps whatever a peer sends as one frame until the frame is whole, also before it has asked for a
password; its limit on a frame's size would hold for those who know it too. So a thread looks at how many
bytes the server got from each new connection, and how many it sent there: one that is let in gets an answer
besides ZeroMQ's greeting. What is cut off between two looks is as much as a network brings in that time.
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

# The greeting of ZMTP 3 (RFC 23), and the byte that the kernel counts for a connection's beginning. A peer
# that is let in gets at least the ten bytes of WELCOME more.
_GREETING_BYTES = 64 + 1
# Of a peer that has not been let in. A handshake of either kind takes less than 500.
_MAX_BYTES = 64 << 10
# More connections that have not said who they are lose the oldest.
_MAX_STRANGERS = 1024
_PERIOD_MS = 20
# Where struct tcp_info of <linux/tcp.h> has tcpi_bytes_acked and tcpi_bytes_received.
_BYTES = struct.Struct("=120xQQ")

_EVENTS = zmq.EVENT_ACCEPTED | zmq.EVENT_CLOSED | zmq.EVENT_DISCONNECTED | zmq.EVENT_MONITOR_STOPPED
_numbers = itertools.count()


def keep_door(server: zmq.Socket[Any]) -> None:
    """Watch over the connections of a server that has not been bound yet, until it is closed."""
    address = f"inproc://doorkeeper-{id(server):x}-{next(_numbers)}"
    server.monitor(address, _EVENTS)
    # A plain socket, whatever kind of context the server has.
    events: zmq.Socket[bytes] = zmq.Context.shadow(server.context.underlying).socket(zmq.PAIR)
    events.linger = 0
    events.connect(address)
    threading.Thread(target=_keep, args=(events,), name="zmq-doorkeeper", daemon=True).start()


def _keep(events: zmq.Socket[bytes]) -> None:
    strangers: dict[int, None] = {}  # descriptors, the oldest first
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
                continue  # who connects without end keeps nobody from being looked at
            next_look_s = time.monotonic() + _PERIOD_MS / 1000
            for descriptor in list(strangers):
                if not _is_stranger(descriptor, is_one_too_many=len(strangers) > _MAX_STRANGERS):
                    del strangers[descriptor]


def _is_stranger(descriptor: int, *, is_one_too_many: bool) -> bool:
    """Return whether a connection is still to be watched; cut it off if it has sent too much."""
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
        return False  # closed meanwhile; its number may be another file's
    finally:
        if connection is not None:
            connection.detach()  # it is ZeroMQ's
