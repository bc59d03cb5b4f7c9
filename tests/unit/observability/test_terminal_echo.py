from __future__ import annotations

import io
import os
import pty
import termios

import pytest

from nemo_like.observability.terminal_echo import without_control_echo


def shows_control_characters(terminal: int) -> bool:
    return bool(termios.tcgetattr(terminal)[3] & termios.ECHOCTL)


def in_a_terminal(session: bool, echo: int) -> tuple[bool, bool]:
    """Return whether a new terminal shows control characters inside the block, and after it.

    Without ``session`` the process that uses the block is not in the foreground of the terminal.
    """
    controller, terminal = pty.openpty()
    settings = termios.tcgetattr(terminal)
    settings[3] = settings[3] & ~termios.ECHOCTL | echo
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
    child = os.fork()
    if child == 0:
        if session:
            os.login_tty(terminal)
        stream = os.fdopen(1 if session else terminal, "w")
        with without_control_echo(stream):
            inside = shows_control_characters(stream.fileno())
        os._exit(2 * inside + shows_control_characters(stream.fileno()))
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.close(controller)
    os.close(terminal)
    assert code >= 0
    return bool(code & 2), bool(code & 1)


@pytest.mark.parametrize("echo", [0, termios.ECHOCTL])
def test_a_terminal_shows_no_control_characters_in_the_block_and_is_as_before_after_it(echo: int) -> None:
    assert in_a_terminal(session=True, echo=echo) == (False, bool(echo))


def test_a_terminal_of_others_stays_as_it_is() -> None:
    assert in_a_terminal(session=False, echo=termios.ECHOCTL) == (True, True)


def test_a_file_is_left_alone() -> None:
    with without_control_echo(io.StringIO()):
        pass
