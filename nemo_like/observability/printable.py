"""Makes text that is not the project's own fit for a terminal, and a terminal fit for any text.

What a model, an environment or data say may hold control characters, with which a terminal moves its cursor,
hides lines, or writes the clipboard of whoever reads it.
"""

from __future__ import annotations

import io
import re
import sys

# Control characters but for tab and line feed, what turns the direction of text, and surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return the text with control characters and halves of surrogate pairs as Python's escapes.

    Tabs and line feeds stay; an end of a line that has a carriage return too loses it.
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))


def warn_on_stderr(text: str) -> None:
    """Print a warning on standard error."""
    sys.stderr.write(printable(f"warning: {text}\n"))


def accept_all_characters() -> None:
    """Have this process's standard output and error write what their encoding lacks with backslashes.

    By itself Python raises UnicodeEncodeError there, in a terminal for ASCII as much as in a log.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
