from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType

import pytest
from ray._private import utils

from nemo_like.compat.lean_ray import callers_signals, deferred_signals
from nemo_like.driver.stopping import sigterm_as_interrupt


@pytest.fixture(autouse=True)
def ctrl_c_interrupts() -> Iterator[None]:
    """Also where the shell that started the tests in the background has it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_a_signal_whose_exception_is_lost_is_raised_at_the_end() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), callers_signals():
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGTERM)
        passed.append("the exception is lost")
    assert passed


def test_a_signal_interrupts_at_once_where_its_exception_is_not_lost() -> None:
    with pytest.raises(KeyboardInterrupt), callers_signals():
        signal.raise_signal(signal.SIGINT)
        pytest.fail("the signal was not handled")


def test_a_deferred_signal_is_handled_at_the_end() -> None:
    passed = []
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt(), deferred_signals():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        passed.append("nothing is interrupted")
    assert passed


def test_ray_replaces_no_handler() -> None:
    def rays(signum: int, frame: FrameType | None) -> None:
        pytest.fail("Ray's handler was called")

    with sigterm_as_interrupt():
        ours = signal.getsignal(signal.SIGTERM)
        with callers_signals():
            utils.set_sigterm_handler(rays)
        assert signal.getsignal(signal.SIGTERM) is ours
    assert utils.set_sigterm_handler.__module__ == utils.__name__
