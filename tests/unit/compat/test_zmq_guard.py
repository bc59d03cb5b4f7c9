"""Sockets of TransferQueue talk to who knows the run's secret, and to nobody else."""

from __future__ import annotations

import pkgutil
import select
import socket
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import transfer_queue
import zmq

from nemo_like.compat import zmq_doorkeeper, zmq_guard
from nemo_like.compat.zmq_guard import Secret, guard, guarding


def opened(secret: Secret, context: zmq.Context, kind: int, ip: str) -> zmq.Socket:
    guard(secret, context)
    # As TransferQueue's controller calls it.
    return zmq_guard.controller.create_zmq_socket(ctx=context, socket_type=kind, ip=ip)


ROOT = Path(__file__).parents[3]


# CURVE too is asked for over loopback here: the address that sockets are told says which it is.
@pytest.mark.parametrize("ip", ["127.0.0.1", "10.0.0.7"])
def test_a_server_hears_only_who_knows_the_secret(ip: str) -> None:
    secret = Secret.new()
    context, others, strangers = zmq.Context(), zmq.Context(), zmq.Context()
    server = opened(secret, context, zmq.ROUTER, ip)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    clients = {
        b"without": others.socket(zmq.DEALER),
        b"with another": opened(Secret.new(), strangers, zmq.DEALER, ip),
        b"with the secret": opened(secret, others, zmq.DEALER, ip),
    }
    for message, client in clients.items():
        client.connect(f"tcp://127.0.0.1:{port}")
        client.send(message)
    heard = []
    while server.poll(500 if heard else 20_000):
        heard.append(server.recv_multipart()[1])
    zmq_guard._authenticators[context].stop()
    server.close(linger=0)
    for one in (others, strangers, context):
        one.destroy(linger=0)
    assert heard == [b"with the secret"]


# What a client says first in ZMTP 3: version, mechanism, that it is no server.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00%s" + bytes(32)


def sent_until_cut_off(port: int, beginning: bytes, at_most: int) -> int:
    """How many bytes a server takes after ``beginning`` before it ends the connection. Who sends may hear of
    the end by a reset, or, where the server takes nothing just then, only by what can be read."""
    chunk, sent = bytes(1 << 20), 0
    with socket.create_connection(("127.0.0.1", port), timeout=20) as stranger, suppress(ConnectionError):
        stranger.sendall(beginning)
        stranger.setblocking(False)
        while sent < at_most:
            readable, writable, _ = select.select([stranger], [stranger], [], 20)
            assert readable or writable, f"still connected after {sent} bytes"
            if readable and not stranger.recv(64):
                break
            if writable:
                sent += stranger.send(chunk)
    return sent


@pytest.mark.parametrize(("ip", "mechanism"), [("127.0.0.1", b"PLAIN"), ("10.0.0.7", b"CURVE")])
def test_a_stranger_cannot_fill_a_servers_memory_but_a_client_may_send_a_lot(
    ip: str, mechanism: bytes
) -> None:
    secret, context = Secret.new(), zmq.Context()
    server = opened(secret, context, zmq.ROUTER, ip)
    port = server.bind_to_random_port("tcp://127.0.0.1")
    # A command of 4 GiB, which ZeroMQ keeps until it is whole.
    beginning = GREETING % mechanism.ljust(20, b"\0") + b"\x06" + (4 << 30).to_bytes(8, "big")
    assert sent_until_cut_off(port, beginning, at_most=2 << 30) < 2 << 30
    client = opened(secret, context, zmq.DEALER, ip)
    client.connect(f"tcp://127.0.0.1:{port}")
    client.send(bytes(100 << 20))
    assert server.poll(20_000) and len(server.recv_multipart()[1]) == 100 << 20
    zmq_guard._authenticators[context].stop()
    client.close(linger=0)
    server.close(linger=0)
    context.term()  # the thread at the door lets go of it


def test_connections_that_say_nothing_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_doorkeeper, "_MAX_STRANGERS", 4)
    context = zmq.Context()
    server = opened(Secret.new(), context, zmq.ROUTER, "127.0.0.1")
    port = server.bind_to_random_port("tcp://127.0.0.1")
    with ExitStack() as opened_ones:
        silent = [
            opened_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
            for _ in range(6)
        ]
        for one in silent[:2]:
            while one.recv(64):
                pass
        silent[-1].settimeout(0.2)
        with pytest.raises(TimeoutError):
            while silent[-1].recv(64):
                pass
    zmq_guard._authenticators[context].stop()
    context.destroy(linger=0)


def test_every_module_that_opens_sockets_is_guarded() -> None:
    """They bind the function by name; one more would open sockets that ask for nothing."""
    binding = set()
    for module in pkgutil.walk_packages(transfer_queue.__path__, "transfer_queue."):
        spec = module.module_finder.find_spec(module.name, None)
        assert spec is not None
        assert spec.origin is not None
        with open(spec.origin, encoding="utf-8") as source:
            if "create_zmq_socket" in source.read():
                binding.add(module.name)
    assert binding == {module.__name__ for module in zmq_guard._MODULES}


def test_what_else_uses_transfer_queue_in_the_process_is_left_as_it_is() -> None:
    guarded, plain = zmq.Context(), zmq.Context()
    with guarding(Secret.new()):
        zmq_guard.base.create_zmq_socket(guarded, zmq.DEALER, "127.0.0.1")
    mechanisms = [
        zmq_guard.base.create_zmq_socket(context, zmq.DEALER, "127.0.0.1").mechanism
        for context in (guarded, plain)
    ]
    for one in (guarded, plain):
        one.destroy(linger=0)
    assert mechanisms == [zmq.PLAIN, zmq.NULL]


def test_a_process_with_a_guarded_unit_ends_when_it_is_asked_to() -> None:
    """TransferQueue's unit waits at the exit for all sockets of its context, the guard's among them."""
    program = (
        "from nemo_like.compat.zmq_guard import Secret, SimpleStorageUnit\n"
        "unit = SimpleStorageUnit(secret=Secret.new(), config={'total_storage_size': None})\n"
        "print(unit.get_zmq_server_info().role.name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=90, check=True
    )
    assert done.stdout.split() == ["STORAGE"]


def test_a_secret_is_not_printed() -> None:
    secret = Secret.new()
    assert secret.password not in repr(secret)
    assert repr(secret) == "Secret()"
