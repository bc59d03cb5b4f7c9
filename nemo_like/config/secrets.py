"""Keeps secrets out of everything written: passwords in URLs, and values that environment variables gave.

A value that an interpolation such as ``${oc.env:TOKEN}`` got from the environment remembers the text of the
interpolation. The run uses the value; files, loggers and messages get the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

MASK = "***"
_SHORTEST_SECRET = 6  # characters

_URL = re.compile(r"""[\w+.-]+://[^\s"'<>]+""")
# The text before the last @ of the server's part. A "/" belongs to the password if no port follows the colon.
# An interpolation, whose value the environment will give, is no password yet.
_PASSWORD = re.compile(r"(?<=://)(?!\[)([^/?#@:]*:)(?!\$\{)(?!\d{1,5}[/?#])([^/?#]+(?=@)|[^@]+(?=@))")
_SECRET_FIELD = re.compile(
    r"([?&](?:[^=&#]*[_-])?(?:access|api|auth|client|private)?"
    r"(?:token|key|secret|password|passwd|signature|credentials?)=)(?!\$\{)([^&#]+)",
    re.IGNORECASE,
)


class Referring:
    """A value that the environment gave. ``reference`` is the interpolation that is written in its place."""

    reference: str = ""


class ReferringText(Referring, str):
    """A text that the environment gave, whole or in part."""


class ReferringList(Referring, list[Any]):
    """A list with texts that the environment gave."""


class ReferringMapping(Referring, dict[str, Any]):
    """A mapping with texts that the environment gave."""


def referring(value: Any, reference: str) -> Any:
    """Return a copy of ``value`` that is written as the interpolation ``reference``.

    A value without any text is returned unchanged: a number or a choice is no secret, and the files of a run
    must say it.
    """
    if not _has_text(value):
        return value
    kinds = {str: ReferringText, list: ReferringList, dict: ReferringMapping}
    marked = next(marked for kind, marked in kinds.items() if isinstance(value, kind))(value)
    marked.reference = reference
    return marked


def reference_of(value: Any) -> str:
    """Return the interpolation written in place of a value from the environment; empty for other values."""
    return value.reference if isinstance(value, Referring) else ""


def referring_texts(value: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (full key, text, interpolation) for each text of a configuration that the environment gave.

    ``value`` is the configuration, or the part of it that has the full key ``key``.
    """
    if isinstance(value, str) and (reference := reference_of(value)):
        yield key, str(value), reference
    elif is_dataclass(value):
        for field in fields(value):
            yield from referring_texts(getattr(value, field.name), f"{key}.{field.name}".lstrip("."))
    elif isinstance(value, Mapping):
        for name, inner in value.items():
            yield from referring_texts(inner, f"{key}.{name}".lstrip("."))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from referring_texts(inner, f"{key}[{index}]")


def without_referred(text: str, configuration: Any) -> str:
    """Return a message in which each text that the environment gave to ``configuration`` is its
    interpolation.

    Texts of fewer than 6 characters stay: they are no secrets, and may stand in the message by chance.
    """
    for _, value, reference in referring_texts(configuration):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, reference)
    return masked(text)


def as_written(value: str) -> str:
    """Return a text of the configuration without secrets, as files and messages may have it."""
    return masked(reference_of(value) or value)


def masked(text: str) -> str:
    """Return the text with passwords in its URLs masked, and with secrets in the URLs' fields masked."""
    if "://" not in text:
        return text
    return _URL.sub(lambda url: _SECRET_FIELD.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}", url[0])), text)


def is_masked(text: str) -> bool:
    """Return whether a text has a URL in which ``masked`` has masked something."""
    return MASK in text and any(MASK in url[0] and masked(url[0]) == url[0] for url in _URL.finditer(text))


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_text, value.values()))
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str)
