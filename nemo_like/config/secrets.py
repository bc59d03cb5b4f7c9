"""What must not be written down: passwords in URLs, and values that environment variables gave.

A value that an interpolation got from the environment, ``${oc.env:TOKEN}``, remembers this text for as long
as it lives. The value is used, and the text is written: into a run's files, to loggers, and in messages.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

MASK = "***"
_SHORTEST_SECRET = 6  # characters

_URL = re.compile(r"""[\w+.-]+://[^\s"'<>]+""")
# What stands before the last @ of the server's part. A "/" is in the password where what follows the colon is
# no port. What the environment will give is no password yet.
_PASSWORD = re.compile(r"(?<=://)(?!\[)([^/?#@:]*:)(?!\$\{)(?!\d{1,5}[/?#])([^/?#]+(?=@)|[^@]+(?=@))")
_SECRET_FIELD = re.compile(
    r"([?&](?:[^=&#]*[_-])?(?:access|api|auth|client|private)?"
    r"(?:token|key|secret|password|passwd|signature|credentials?)=)(?!\$\{)([^&#]+)",
    re.IGNORECASE,
)


class Referring:
    """A value that the environment gave. ``reference`` is the text that stands for it where it is written."""

    reference: str = ""


class ReferringText(Referring, str):
    """A text that the environment gave, whole or in part."""


class ReferringList(Referring, list[Any]):
    """A list with texts that the environment gave."""


class ReferringMapping(Referring, dict[str, Any]):
    """A mapping with texts that the environment gave."""


def referring(value: Any, reference: str) -> Any:
    """Return a value that is written as ``reference``.

    Without a text in it the value itself is returned: a number or a choice is no secret, and files that say
    what a run did must have it.
    """
    if not _has_text(value):
        return value
    kinds = {str: ReferringText, list: ReferringList, dict: ReferringMapping}
    marked = next(marked for kind, marked in kinds.items() if isinstance(value, kind))(value)
    marked.reference = reference
    return marked


def reference_of(value: Any) -> str:
    """Return the text that is written for a value which the environment gave; empty for any other value."""
    return value.reference if isinstance(value, Referring) else ""


def referring_texts(value: Any, key: str = "") -> Iterator[tuple[str, str, str]]:
    """Yield (full key, text, reference) for each text of a configuration that the environment gave.

    ``value`` is the configuration or a part of it, which has the full key ``key``.
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
    """Return a message without the texts that the environment gave to a configuration, or a part of it. Short
    ones stay: they are no secrets, and may stand in it by chance."""
    for _, value, reference in referring_texts(configuration):
        if len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, reference)
    return masked(text)


def as_written(value: str) -> str:
    """Return what may be written of a text of the configuration."""
    return masked(reference_of(value) or value)


def masked(text: str) -> str:
    """Return the text with the passwords of its URLs masked, and what their queries call a token or key."""
    if "://" not in text:
        return text
    return _URL.sub(lambda url: _SECRET_FIELD.sub(rf"\1{MASK}", _PASSWORD.sub(rf"\1{MASK}", url[0])), text)


def is_masked(text: str) -> bool:
    """Return whether a text has a URL whose password ``masked`` took away."""
    return MASK in text and any(MASK in url[0] and masked(url[0]) == url[0] for url in _URL.finditer(text))


def _has_text(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_text, value.values()))
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str)
