"""The tests' side of a program: stand-ins for its functions, which call them by value.

Nothing that the program made is ever an object here. Its replies are read as plain data, so an ``__eq__``, a
subclass or a patched module of the program stays in the program's own process.
"""

from __future__ import annotations

import builtins
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO, NoReturn

from nemo_like.environments.sandboxed import plain_data

# Exceptions that would end an iteration, and so a test, early when raised inside map() or a generator.
_ENDS_ITERATION = (StopIteration, StopAsyncIteration, GeneratorExit)


class RefusedTests(BaseException):
    """The tests need more than calls by value can give; the message says what."""


class ProgramFailed(BaseException):
    """The program has ended, or its reply is malformed or no plain data. No test can pass after that."""


class ProgramExit(SystemExit):
    """A function of the program raised SystemExit; unlike a SystemExit of the tests, it never means
    success."""


class RemoteProgram:
    """The channel to the program, and the failures so far.

    Tests may catch every exception raised here, so ``refusal`` and ``failure`` are remembered as well.
    """

    def __init__(self, calls: BinaryIO, replies: BinaryIO) -> None:
        self._calls, self._replies = calls, replies
        self._turn = threading.Lock()
        self.num_calls = 0
        self.refusal: str | None = None  # why these tests cannot be run by value
        self.failure: str | None = None  # why the program can pass no test any more
        self.returned: str | None = None  # the type of a result that was no plain data

    def refuse(self, reason: str) -> NoReturn:
        """Raise RefusedTests; the first reason is remembered as ``refusal``."""
        self.refusal = self.refusal or reason
        raise RefusedTests(reason)

    def call(self, name: str, arguments: Sequence[Any], named: dict[str, Any]) -> Any:
        """Return the result of the function ``name``, or raise its exception.

        Raises RefusedTests for arguments that are no plain data, and ProgramFailed without a proper reply.
        """
        try:
            tree = plain_data.encode([name, list(arguments), named], simplify=plain_data.strict)
        except plain_data.NotPlain as other:
            self.refuse(f"they pass a {other} to {name}")
        except RecursionError:
            self.refuse(f"they pass a value that nests too deeply to {name}")
        with self._turn:
            if self.failure is not None:
                raise ProgramFailed(self.failure)
            self.num_calls += 1
            reply = self._exchange(tree)
        match reply:
            case ("value", value):
                return value
            case ("raised", classes, values):
                raise _own_exception(classes, values)

    def _exchange(self, tree: Any) -> tuple[Any, ...]:
        """Send a call; return ``("value", value)`` or ``("raised", names of classes, arguments)``."""
        try:
            plain_data.write_frame(self._calls, tree)
            match plain_data.read_frame(self._replies):
                case {"value": value}:
                    return "value", plain_data.decode(value)
                case {"raised": [*classes], "arguments": [*values]}:
                    return "raised", classes, plain_data.decode(values)
                case {"object": str(kind)}:
                    self.returned = kind
                    self.failure = f"it returned a {kind}, which is no plain data"
                case _:
                    self.failure = "it sent what is no reply"
        # A program may send anything, so reading it may fail in any way.
        except Exception as error:
            self.failure = f"no reply: {type(error).__name__} {error}"
        raise ProgramFailed(self.failure)


class RemoteFunction:
    """Stands for a function of the program in the tests' namespace. It can only be called."""

    def __init__(self, program: RemoteProgram, name: str) -> None:
        object.__setattr__(self, "_program", program)
        object.__setattr__(self, "__name__", name)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        return self._program.call(self.__name__, arguments, named)

    def __getattr__(self, attribute: str) -> NoReturn:
        self._program.refuse(f"they use {self.__name__}.{attribute}")

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        self._program.refuse(f"they set {self.__name__}.{attribute}")

    def __instancecheck__(self, instance: Any) -> NoReturn:
        self._program.refuse(f"they ask whether something is an instance of {self.__name__}")

    def __mro_entries__(self, bases: Any) -> NoReturn:
        self._program.refuse(f"they derive a class from {self.__name__}")


def _own_exception(classes: Sequence[Any], values: Sequence[Any]) -> BaseException:
    """Return an exception of the first class in ``classes`` that is Python's own, with these arguments."""
    found = (getattr(builtins, name, None) for name in classes if isinstance(name, str))
    kind = next((one for one in found if isinstance(one, type) and issubclass(one, BaseException)), Exception)
    if issubclass(kind, SystemExit):
        kind = ProgramExit
    elif issubclass(kind, _ENDS_ITERATION):
        kind = RuntimeError
    try:
        return kind(*values)
    except Exception:  # the class takes other arguments than its exceptions have in ``args``
        return Exception(*values)
