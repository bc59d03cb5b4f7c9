"""The first process in an agent's sandbox: it forwards connections to the endpoint, and runs the command.

command ──▶ 127.0.0.1:port, in the sandbox's own network ──▶ this process ──▶ Unix socket of the host
"""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import threading
from contextlib import suppress

from nemo_like.environments.sandboxed.confine import confine

_CHUNK_BYTES = 65536
_FILES_OF_CONNECTION = 2
_OTHER_FILES = 16  # of this process, at most


def main(port: str, endpoint: str, num_words: str, user_id: str, limits: str, *others: str) -> None:
    """Confine this process, then run the command, whose words are the first ``num_words`` of ``others``; end
    with the command's exit code or signal."""
    confine(int(user_id), limits)
    command = others[: int(num_words)]
    if endpoint:
        listening = socket.create_server(("127.0.0.1", int(port)), backlog=128)
        threading.Thread(target=_serve, args=(listening, endpoint), daemon=True).start()
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        os.write(2, f"the command cannot be started: {error}\n".encode())
        code = 127
    if code < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def _serve(listening: socket.socket, endpoint: str) -> None:
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # Connections beyond these wait until another one ends.
    room = threading.Semaphore(max(1, (most_files - _OTHER_FILES) // _FILES_OF_CONNECTION))
    while True:
        room.acquire()
        try:
            theirs, _ = listening.accept()
        except OSError:  # the client has gone
            room.release()
            continue
        try:
            threading.Thread(target=_lead, args=(theirs, endpoint, room), daemon=True).start()
        except RuntimeError:  # this process has as many threads as it may
            theirs.close()
            room.release()


def _lead(theirs: socket.socket, endpoint: str, room: threading.Semaphore) -> None:
    """Forward one connection to the endpoint until either side ends it, then close it: an open connection
    would make a client that still sends wait forever."""
    try:
        _lead_both_ways(theirs, endpoint)
    finally:
        room.release()


def _lead_both_ways(theirs: socket.socket, endpoint: str) -> None:
    with suppress(OSError, RuntimeError), theirs, socket.socket(socket.AF_UNIX) as ours:
        ours.connect(endpoint)
        back = threading.Thread(target=_pump, args=(ours, theirs), daemon=True)
        back.start()
        _pump(theirs, ours)
        back.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            sink.sendall(chunk)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
