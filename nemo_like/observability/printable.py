"""Makes foreign text safe for a terminal, and makes a terminal accept any text.

Text from a model, an environment or data may hold control characters, with which a terminal moves its cursor,
hides lines, or writes the clipboard of its user.
"""

from __future__ import annotations

import io
import re
import sys

# Control characters but for tab and line feed, characters that turn the direction of text, and surrogates.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """Return the text with control characters and lone surrogates written as Python's escapes.

    Tabs and line feeds stay; a carriage return before a line feed is dropped.
    """
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text.replace("\r\n", "\n"))


def warn_on_stderr(text: str) -> None:
    """Print a warning on standard error."""
    sys.stderr.write(printable(f"warning: {text}\n"))


def accept_all_characters() -> None:
    """Have standard output and error write characters that their encoding lacks as escapes with backslashes.

    By default Python raises UnicodeEncodeError, on a terminal for ASCII as well as in a log.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
