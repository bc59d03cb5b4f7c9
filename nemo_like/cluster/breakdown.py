"""Lets a process of a run say that it is no longer usable, although it lives.

    an error of no check: no memory, a library's error ─▶ break_down ─▶ the watch on this process ends
    ─▶ every wait of the driver raises ``ActorBroken``, as it raises ``ActorDied`` when a process is gone

The driver then replaces the process, or starts all again, as after a death.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

from ray.exceptions import RayError

from nemo_like.cluster.actor_errors import Overdue
from nemo_like.observability.printable import printable

# Errors of code that was given something wrong: it would raise the same again.
CODE_ERRORS = (ValueError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError)
# Classes of errors, of Python and of libraries, that no death of another process causes.
OUT_OF_MEMORY = {"MemoryError", "OutOfMemoryError"}
_SAID_OUT_OF_MEMORY = ("out of memory", "can't allocate memory")
_MAX_CHARACTERS = 300
_PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Why a process is no longer usable: the error that it raised."""

    kind: str  # the error's class
    reason: str  # one line


_lock = threading.Lock()
_breakdown: Future[Breakdown] = Future()


def breakdown_future() -> Future[Breakdown]:
    """Return a future that is done as soon as this process is no longer usable."""
    return _breakdown


def break_down(error: BaseException, doing: str = "") -> None:
    """Declare this process dead because of ``error``; ``doing`` begins the reason. Only the first error of
    a process counts."""
    with _lock:
        if not _breakdown.done():
            _breakdown.set_result(Breakdown(type(error).__name__, f"{doing}{in_short(error)}"))


@contextmanager
def breaking_down(counts: Callable[[Exception], bool] = lambda error: True) -> Iterator[None]:
    """Declare this process dead when the block raises an error such as a lack of memory or a library's
    failure. Errors of this project's checks, of wrong code or input (``CODE_ERRORS``), and errors that
    another process caused, do not count, nor does an error for which ``counts`` returns false."""
    try:
        yield
    except Exception as error:
        is_known = isinstance(error, CODE_ERRORS) or is_own(error) or _is_of_another(error)
        if not is_known and counts(error):
            break_down(error)
        raise


def is_own(error: BaseException) -> bool:
    """Return whether an error is of one of this project's classes, whose messages say what to do."""
    return type(error).__module__.partition(".")[0] == _PACKAGE


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the error says that the machine or a GPU has no memory left. Libraries have classes of
    their own for it, and some say it only in the text."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return bool(names & OUT_OF_MEMORY) or any(text in str(error).lower() for text in _SAID_OUT_OF_MEMORY)


def in_short(error: BaseException) -> str:
    """Return an error's class and the beginning of its text, in one line that is fit for a terminal."""
    text = " ".join(printable(str(error)).split())
    shown = text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}..."
    return f"{type(error).__name__}: {shown}" if shown else type(error).__name__


def _is_of_another(error: BaseException) -> bool:
    """Return whether another process raised the error first, or did not answer in time."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, RayError | Overdue | TimeoutError):
            return True
        cause = cause.__cause__ or cause.__context__
    return False
