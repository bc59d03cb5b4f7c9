"""The first process in an agent's sandbox: it leads connections to the endpoint, and runs the command.

command ──▶ 127.0.0.1:port, in the sandbox's own network ──▶ this process ──▶ Unix socket of the host
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
import time
from contextlib import suppress

from nemo_like.environments.inside.confine import confine

_CHUNK_BYTES = 65536
_PAUSE_S = 0.05


def main(port: str, endpoint: str, num_words: str, user_id: str, limits: str, *others: str) -> None:
    """Confine this process, then run the command, whose words are the first ``num_words`` of ``others``; end
    as it ends."""
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
    while True:
        try:
            theirs, _ = listening.accept()
        except OSError:
            time.sleep(_PAUSE_S)  # the command has as many files open as it may
            continue
        try:
            threading.Thread(target=_lead, args=(theirs, endpoint), daemon=True).start()
        except RuntimeError:  # it has as many threads as it may
            theirs.close()


def _lead(theirs: socket.socket, endpoint: str) -> None:
    """Lead one connection to the endpoint, until either side ends it, and close it: a client that still sends
    then would wait for room without end."""
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
