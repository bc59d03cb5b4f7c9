r"""Turns numbers and units from LaTeX into plain text: ``50\%`` becomes ``50%``, ``10\,000`` ``10000``.

A model and a reference answer may write the same quantity in both ways. Only typesetting is taken out, and
only at a number: units, digits, signs and commas stay as they are.
"""

from __future__ import annotations

import re

# A percent or dollar sign is escaped since LaTeX has its own use for it. A macro \%x does not exist.
_PERCENT = re.compile(r"(?<=\d)(\s*)(?:\\[,!;: ])?\\%")
_DOLLAR = re.compile(r"\\\$(?=\s*-?\.?\d)")
# A thin space, or a comma that \! sets closer, between groups of three digits. A comma with a thin space
# after it separates two numbers.
_GROUPS = re.compile(r"(?<=\d)(?:,?\\!|(?<!,)\\,)(?=\d{3}(?!\d))")
_DEGREES = re.compile(r"(?<=\d)\s*\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\})")
_QUANTITY = re.compile(r"[-+]?\$?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)\s*(?:%|°(?:\s*[CF])?)?")


def plain_numbers(text: str) -> str:
    r"""Return a text in which numbers have plain percent and dollar signs, and no typeset groups of digits.

    ``50\%`` becomes ``50%``, ``\$50`` ``$50``, ``10\,000`` and ``10,\!000`` ``10000``.
    """
    if "\\" not in text:
        return text
    return _DOLLAR.sub("$", _PERCENT.sub(r"\1%", _GROUPS.sub("", text)))


def plain_quantity(text: str) -> str:
    r"""Return ``plain_numbers`` of a text that is one number with its unit, ``90^\circ`` as ``90°``.

    Any other text stays as it is: in a command or a program a backslash has another meaning.
    """
    plain = _DEGREES.sub("°", plain_numbers(text))
    return plain if _QUANTITY.fullmatch(plain.strip()) else text
