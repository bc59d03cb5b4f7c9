"""Somebody else on the machine: offers pickles that leave a mark to ports of which he knows no secret.

python -m tests.functional.stranger FOLDER PORT...: FOLDER/PORT exists afterwards where one was unpickled
"""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import msgpack
import zmq


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


def main(folder: str, *ports: str) -> None:
    with ThreadPoolExecutor(len(ports)) as pool:
        for done in [pool.submit(offer, int(port), f"{folder}/{port}") for port in ports]:
            done.result()
    # Sockets on their way to what is no ZeroMQ are not waited for.
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
