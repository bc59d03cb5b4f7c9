"""Guards TransferQueue's ZeroMQ sockets with the run's secret, so that nobody else's bytes are unpickled.

TransferQueue opens all its sockets through one function, which four of its modules bind by name, and has no
setting for secrets. This module puts another function in its place, which guards the contexts that ``guard``
or ``guarding`` names and leaves others as they are. A server lets its ZAP authenticator (ZeroMQ's RFC 27)
decide who may connect. On loopback the client gives a password (PLAIN, RFC 24), since nobody can listen
there; between nodes it proves that it has a key, and all traffic is encrypted too (CURVE, RFC 25 and 26).

Private parts: ``zmq_utils.create_zmq_socket`` of TransferQueue 0.1.11, which is replaced, its actor classes,
and ``__ray_actor_class__`` of ray 2.60.0. TransferQueue has no setting for a secret, and unpickles whatever
it receives. This module can go with a TransferQueue that authenticates its peers.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, finalize

import zmq
from transfer_queue import controller
from transfer_queue.storage import simple_storage
from transfer_queue.storage.managers import base
from transfer_queue.utils import zmq_utils
from zmq.auth.thread import ThreadAuthenticator

from nemo_like.compat.zmq_doorkeeper import keep_door

_MODULES: tuple[Any, ...] = (zmq_utils, controller, simple_storage, base)
_create_zmq_socket = zmq_utils.create_zmq_socket

_USER = "nemo_like"
_LOOPBACK = ("127.", "::1", "localhost")
# The send buffer of a socket on loopback. When it is this small, the receiver reads what was sent from the
# processor's cache, in half the time. Between nodes the kernel finds the size that fills the line.
_NEAR_BUFFER_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class Secret:
    """A secret that only the processes of one run know. It travels through Ray, which has its own token."""

    password: str = field(repr=False)
    server_keys: tuple[bytes, bytes] = field(repr=False)  # public, secret
    client_keys: tuple[bytes, bytes] = field(repr=False)

    @classmethod
    def new(cls) -> Secret:
        """Return a new random secret."""
        return cls(secrets.token_urlsafe(32), zmq.curve_keypair(), zmq.curve_keypair())


class _OnlyClients:
    """The check by which an authenticator lets in only clients that have the run's client key."""

    def __init__(self, public_key: bytes) -> None:
        self._public_key = public_key

    def callback(self, domain: str, key: bytes) -> bool:
        return secrets.compare_digest(key, self._public_key)


_secrets: WeakKeyDictionary[zmq.Context[Any], Secret] = WeakKeyDictionary()
_authenticators: WeakKeyDictionary[zmq.Context[Any], ThreadAuthenticator] = WeakKeyDictionary()
_current: ContextVar[Secret | None] = ContextVar("secret of the contexts that open sockets", default=None)


def guard(secret: Secret, context: zmq.Context[Any]) -> None:
    """Guard all sockets that TransferQueue opens on ``context`` from now on with ``secret``."""
    for module in _MODULES:
        module.create_zmq_socket = _guarded_socket
    _secrets[context] = secret


@contextmanager
def guarding(secret: Secret) -> Iterator[None]:
    """Guard every context on which TransferQueue opens a socket within the block; it stays guarded."""
    token = _current.set(secret)
    for module in _MODULES:
        module.create_zmq_socket = _guarded_socket
    try:
        yield
    finally:
        _current.reset(token)


def _guarded_socket(
    ctx: zmq.Context[Any], socket_type: int, ip: str, identity: bytes | None = None
) -> zmq.Socket[Any]:
    socket = _create_zmq_socket(ctx, socket_type, ip, identity=identity)
    if ip.startswith(_LOOPBACK):
        socket.setsockopt(zmq.SNDBUF, _NEAR_BUFFER_BYTES)
    secret = _secrets.get(ctx) or _current.get()
    if secret is None:
        return socket
    _secrets[ctx] = secret
    is_server = socket_type == zmq.ROUTER
    if is_server:
        _authenticate(secret, ctx)
        keep_door(socket)
    (_use_password if ip.startswith(_LOOPBACK) else _use_keys)(socket, secret, is_server)
    return socket


def _use_password(socket: zmq.Socket[Any], secret: Secret, is_server: bool) -> None:
    if is_server:
        socket.plain_server = True
    else:
        socket.plain_username, socket.plain_password = _USER.encode(), secret.password.encode()


def _use_keys(socket: zmq.Socket[Any], secret: Secret, is_server: bool) -> None:
    public_key, secret_key = secret.server_keys if is_server else secret.client_keys
    socket.curve_publickey, socket.curve_secretkey = public_key, secret_key
    if is_server:
        socket.curve_server = True
    else:
        socket.curve_serverkey = secret.server_keys[0]


def _authenticate(secret: Secret, ctx: zmq.Context[Any]) -> None:
    """Start the context's authenticator unless it runs; it is a thread that servers ask about each client."""
    if ctx not in _authenticators:
        authenticator = _authenticators[ctx] = ThreadAuthenticator(ctx)
        authenticator.start()
        authenticator.configure_plain(domain="*", passwords={_USER: secret.password})
        authenticator.configure_curve_callback(
            domain="*", credentials_provider=_OnlyClients(secret.client_keys[0])
        )


def _stop_authenticators() -> None:
    while _authenticators:
        _authenticators.popitem()[1].stop()


class _Guarded:
    """An actor that builds an object of one of TransferQueue's actor classes and guards all its sockets."""

    actor_class: Any  # Ray's wrapper of the class, which would start a process of its own

    def __init__(self, secret: Secret, **kwargs: Any) -> None:
        with guarding(secret):
            self._guarded = self.actor_class.__ray_actor_class__(**kwargs)
        # When a process exits, the finalizer that was added last runs first. So the authenticators close
        # their sockets before TransferQueue's finalizer waits until all sockets of its context are closed.
        finalize(self, _stop_authenticators)

    def get_zmq_server_info(self) -> Any:
        """Return the addresses of the guarded object's sockets."""
        return self._guarded.get_zmq_server_info()


class TransferQueueController(_Guarded):
    """TransferQueue's controller, guarded. It takes the controller's arguments."""

    actor_class = controller.TransferQueueController


class SimpleStorageUnit(_Guarded):
    """TransferQueue's storage unit, guarded. It takes the unit's arguments."""

    actor_class = simple_storage.SimpleStorageUnit
