"""The first process in an agent's sandbox: it leads connections to the endpoint, and runs the command.

command ──▶ 127.0.0.1:port, in the sandbox's own network ──▶ this process ──▶ Unix socket of the host
"""

from __future__ import annotations

import os
import socket
import subprocess
import threading
from contextlib import suppress

from nemo_like.environments.inside.confine import confine

_CHUNK_BYTES = 65536


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
        theirs, _ = listening.accept()
        try:
            ours = socket.socket(socket.AF_UNIX)
            ours.connect(endpoint)
        except OSError:
            theirs.close()
            continue
        for source, sink in ((theirs, ours), (ours, theirs)):
            threading.Thread(target=_pump, args=(source, sink), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while chunk := source.recv(_CHUNK_BYTES):
            sink.sendall(chunk)
    for one in (source, sink):
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
