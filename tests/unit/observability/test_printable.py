from __future__ import annotations

import io
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.observability.console import PlainConsole, make_console
from nemo_like.observability.options import ConsoleMode
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.progress import RunProgress

# Writes "pwned" to the clipboard of a terminal that knows the sequence.
CLIPBOARD = "\x1b]52;c;cHduZWQ=\x07"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("größer 大 🙂", "größer 大 🙂"),
        (CLIPBOARD, "\\x1b]52;c;cHduZWQ=\\x07"),
        ("wrong\rright", "wrong\\rright"),
        ("line\r\nline", "line\nline"),
        ("\x9b2J", "\\x9b2J"),
        ("half \udc80", "half \\udc80"),
        ("\u202edlrow", "\\u202edlrow"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown


@given(st.text(st.characters(exclude_categories=())))
def test_what_is_printable_can_be_encoded_and_is_left_as_it_is(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert printable(shown) == shown


def test_a_note_with_text_of_a_model_moves_no_cursor() -> None:
    stream = io.StringIO()
    PlainConsole(stream, RunProgress(10)).note(f"answer: {CLIPBOARD}")
    assert stream.getvalue() == "answer: \\x1b]52;c;cHduZWQ=\\x07\n"


def test_a_terminal_that_lacks_a_character_gets_its_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    console = make_console(ConsoleMode.plain, sys.stdout, "run", RunProgress(10))
    console.note("größer 大")
    assert written.getvalue() == b"gr\xf6\xdfer \\u5927\n"


def test_a_stream_that_is_no_text_file_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", stream := io.StringIO())
    accept_all_characters()
    stream.write("大")
