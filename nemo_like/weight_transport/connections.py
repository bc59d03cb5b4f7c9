"""Connections between a sender of weights and its receivers, over which they agree on every transfer.

    receiver ──▶ sender    ready      the receiver is about to load and will read what is sent now
                           took       the receiver has copied a bucket out of a shared buffer
                           loaded     the receiver has loaded the whole transfer
                           gave up    the receiver has ended the transfer without loading it
    sender ──▶ receiver    messages that say which tensor lies where

A connection closes when its process ends, for whatever reason, and a wait at the other end fails at once.
"""

from __future__ import annotations

import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from pathlib import Path

_STATEMENT = struct.Struct("<qq")  # (number of the transfer, word)
_TIMEVAL = struct.Struct("@ll")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt to bring a version to the receivers; ``number`` counts the attempts.

    All senders give an attempt the same number. A version that is tried again gets a new number, so that no
    receiver takes what a failed attempt left behind.
    """

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """The address at which receivers connect to one sender."""

    name: str
    location: str | tuple[str, int]  # a socket's path that only this user may enter, or host and port
    timeout_s: float  # deadline for connecting, and for every later wait


class Word(IntEnum):
    """What a receiver tells the sender about a transfer."""

    ready = 1
    took = 2
    loaded = 3
    gave_up = 4


class GivenUp(RuntimeError):
    """Raised when the engines gave the transfer up before they loaded anything."""


@dataclass(slots=True)
class _Said:
    """What one receiver has said so far: for each word, the number of the latest transfer."""

    ready: int = -1
    num_taken: int = 0  # buckets of the transfer that it is ready for
    loaded: int = -1
    gave_up: int = -1

    def add(self, number: int, word: Word) -> None:
        match word:
            case Word.ready:
                self.ready, self.num_taken = number, 0
            case Word.took:
                self.num_taken += 1
            case Word.loaded:
                self.loaded = number
            case Word.gave_up:
                self.gave_up = number


class Receivers:
    """The sender's connections to all its receivers.

    Every wait raises RuntimeError when a receiver is gone, and TimeoutError at the deadline.
    """

    def __init__(self, name: str, num_receivers: int, timeout_s: float, host: str | None = None) -> None:
        """Listen for receivers on this node; with ``host``, listen at a free port of that address instead."""
        self._num_receivers = num_receivers
        self._said: dict[Connection, _Said] = {}
        self._directory: Path | None = None
        if host is None:
            self._directory = Path(tempfile.mkdtemp(prefix="nemo_like-"))
            self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._listener.bind(str(self._directory / "socket"))
        else:
            self._listener = socket.create_server((host, 0))
        self._listener.listen(num_receivers)
        location = self._listener.getsockname()
        self.endpoint = Endpoint(name, location if host is None else location[:2], timeout_s)

    def open(self, greet: Callable[[socket.socket], object] = lambda receiver: None) -> None:
        """Wait until every receiver has connected, and call ``greet`` with the socket of each.

        Raises a TimeoutError that says how many receivers are missing.
        """
        deadline = time.monotonic() + self.endpoint.timeout_s
        try:
            while len(self._said) < self._num_receivers:
                self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
                receiver, _ = self._listener.accept()
                greet(receiver)
                self._said[_connection(receiver, self.endpoint.timeout_s)] = _Said()
        except TimeoutError:
            missing = self._num_receivers - len(self._said)
            raise TimeoutError(
                f"{self.endpoint.name!r}: {missing} of {self._num_receivers} receivers did not connect "
                f"within {self.endpoint.timeout_s:g} s"
            ) from None
        finally:
            self._stop_listening()

    def broadcast(self, message: Callable[[], bytes] | bytes) -> None:
        """Send every receiver the message. A function is called once per receiver, to make one message for
        each."""
        self._check_open()
        for receiver in self._said:
            with self._noticing_its_end():
                while receiver.poll():
                    self._listen_to(receiver)
                receiver.send_bytes(message if isinstance(message, bytes) else message())

    def wait_until_ready(self, transfer: Transfer) -> None:
        """Wait until every receiver is about to load the transfer. Raises GivenUp when a receiver gave it
        up."""
        number = transfer.number
        self._wait_for(lambda said: max(said.ready, said.gave_up) >= number, f"get ready for {transfer}")
        if any(said.gave_up >= number for said in self._said.values()):
            raise GivenUp(f"the engines gave up {transfer} of {self.endpoint.name!r}")

    def wait_until_taken(self, num_buckets: int) -> None:
        """Wait until every receiver has copied ``num_buckets`` buckets of the present transfer out."""
        self._wait_for(lambda said: said.num_taken >= num_buckets, f"take bucket {num_buckets - 1}")

    def all_loaded(self, number: int) -> bool:
        """Wait until the transfer has ended for every receiver, and return whether all loaded it."""
        self._wait_for(lambda said: max(said.loaded, said.gave_up) >= number, f"end transfer {number}")
        return all(said.loaded >= number for said in self._said.values())

    def close(self) -> None:
        """Close the connections: a receiver that waits fails at once. Safe to call twice."""
        self._stop_listening()
        for receiver in self._said:
            receiver.close()
        self._said.clear()

    def _check_open(self) -> None:
        if len(self._said) < self._num_receivers:
            raise RuntimeError(f"{self.endpoint.name!r} is closed, so its receivers must connect anew")

    def _wait_for(self, is_done: Callable[[_Said], bool], what: str) -> None:
        self._check_open()
        deadline = time.monotonic() + self.endpoint.timeout_s
        while pending := [receiver for receiver, said in self._said.items() if not is_done(said)]:
            heard = wait(pending, max(0.0, deadline - time.monotonic()))
            if not heard:
                raise TimeoutError(
                    f"{self.endpoint.name!r}: {len(pending)} of {self._num_receivers} receivers did not "
                    f"{what} within {self.endpoint.timeout_s:g} s"
                )
            for receiver in heard:
                assert isinstance(receiver, Connection)
                with self._noticing_its_end():
                    self._listen_to(receiver)

    def _listen_to(self, receiver: Connection) -> None:
        number, word = _STATEMENT.unpack(receiver.recv_bytes())
        self._said[receiver].add(number, Word(word))

    @contextmanager
    def _noticing_its_end(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{self.endpoint.name!r}: a receiver went away") from error

    def _stop_listening(self) -> None:
        self._listener.close()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)


class SenderConnection:
    """A receiver's connection to one sender.

    The constructor raises OSError (TimeoutError is one) when the sender cannot be reached.
    """

    def __init__(
        self, endpoint: Endpoint, greeted: Callable[[socket.socket], object] = lambda sender: None
    ) -> None:
        """Connect, and call ``greeted`` with the socket, to read what the sender's ``greet`` sent."""
        self.endpoint = endpoint
        is_local = isinstance(endpoint.location, str)
        sender = socket.socket(socket.AF_UNIX if is_local else socket.AF_INET, socket.SOCK_STREAM)
        sender.settimeout(endpoint.timeout_s)
        sender.connect(endpoint.location)
        greeted(sender)
        self._connection = _connection(sender, endpoint.timeout_s)

    def say(self, word: Word, number: int) -> None:
        """Tell the sender a word on a transfer. Raises RuntimeError when the sender is gone."""
        try:
            self._connection.send_bytes(_STATEMENT.pack(number, word))
        except ConnectionError as error:
            raise RuntimeError(f"{self.endpoint.name!r} went away") from error

    def hear(self, waited_for: str) -> bytes:
        """Return the sender's next message.

        Raises RuntimeError when the sender is gone, TimeoutError at the deadline; both messages name
        ``waited_for``.
        """
        name, timeout_s = self.endpoint.name, self.endpoint.timeout_s
        try:
            if not self._connection.poll(timeout_s):
                raise TimeoutError(f"{name!r} announced no {waited_for} within {timeout_s:g} s")
            return self._connection.recv_bytes()
        except (EOFError, ConnectionError) as error:
            raise RuntimeError(f"{name!r} went away while {waited_for} was waited for") from error

    def close(self) -> None:
        """Close the connection: a sender that waits fails at once. Safe to call twice."""
        self._connection.close()


def _connection(connected: socket.socket, timeout_s: float) -> Connection:
    """Make a connection for messages from a socket; a message that stops halfway fails at the deadline."""
    connected.settimeout(None)
    timeout = _TIMEVAL.pack(int(timeout_s), int(timeout_s % 1 * 1e6) or 1)
    for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
        connected.setsockopt(socket.SOL_SOCKET, option, timeout)
    if connected.family == socket.AF_INET:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Connection(connected.detach())
