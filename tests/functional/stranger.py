"""Somebody else on the machine: offers pickles that leave a mark to ports of which he knows no secret, and
sends them more than they may keep.

python -m tests.functional.stranger FOLDER PORT...: FOLDER/PORT exists afterwards where one was unpickled
"""

from __future__ import annotations

import contextlib
import encodings.idna  # noqa: F401  the interpreter's files may be the first user's alone
import os
import pickle
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import msgpack
import zmq

# A peer of ZeroMQ that has a password, and begins with a command of 8 GiB.
_FLOOD = (
    b"\xff" + bytes(7) + b"\x01\x7f\x03\x00PLAIN" + bytes(15 + 32) + b"\x06" + (8 << 30).to_bytes(8, "big")
)
_FLOOD_BYTES = 256 << 20
_STRANGER = 12345


class Mark:
    """Makes a folder where it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def offer(port: int, mark: str) -> None:
    """Send it as it is, and in messages as TransferQueue's own clients send them."""
    content = pickle.dumps(Mark(mark))
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as raw:
        raw.settimeout(0.5)
        raw.sendall(content)
        raw.recv(64)
    # What msgpack does not know is an extension there, which is unpickled.
    message = msgpack.packb(msgpack.ExtType(1, content))
    for identity in (b"stranger", b"TQ_STORAGE_stranger"):
        client = zmq.Context.instance().socket(zmq.DEALER)
        client.setsockopt(zmq.IDENTITY, identity + str(port).encode())
        client.setsockopt(zmq.SNDTIMEO, 1000)
        client.connect(f"tcp://127.0.0.1:{port}")
        with contextlib.suppress(zmq.Again):  # who is not let in has nowhere to send to
            client.send_multipart([message])
        client.poll(1000)


def flood(port: int) -> None:
    """Send what a server would have to keep until it is whole, for as long as it is taken."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1) as raw:
        raw.sendall(_FLOOD)
        for _ in range(_FLOOD_BYTES >> 20):
            raw.sendall(bytes(1 << 20))


def become_another_user() -> None:
    """Take the id of a user that owns nothing, as root may."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(_STRANGER, _STRANGER, _STRANGER)
        os.setresuid(_STRANGER, _STRANGER, _STRANGER)


def main(folder: str, *ports: str) -> None:
    become_another_user()
    with ThreadPoolExecutor(len(ports)) as pool:
        for done in [pool.submit(offer, int(port), f"{folder}/{port}") for port in ports]:
            done.result()
        for done in [pool.submit(flood, int(port)) for port in ports]:
            done.result()
    # Sockets on their way to what is no ZeroMQ are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
