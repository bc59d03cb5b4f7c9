"""What several frameworks' tables do to values. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from shlex import quote
from typing import Any

from nemo_like.config.frameworks.entries import LEFT_OUT, Convert, Noted, Theirs, Untranslatable

# Why a critic has no key for the choices of an engine's routers.
CRITICS_ROUTERS = "engines sample with the policy's routers; a critic has its own"
PRECISIONS = {
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
    "float32": "float32",
    "fp32": "float32",
}


def one_of(values: Mapping[Any, Any], remedy: str) -> Convert:
    """Return a conversion by a table of values; ``remedy`` is for a value that is not in it."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if value not in values:
            raise Untranslatable(f"only {', '.join(map(str, values))} can be translated; {remedy}")
        return values[value]

    return convert


def model_directory(value: Any, theirs: Theirs) -> Any:
    """Return the directory of a model, where recipes here expect a download from the hub."""
    name = str(value)
    if len(PurePath(name).parts) != 2 or name.startswith((".", "/", "~")):
        return home(name)
    directory = f"models/{PurePath(name).name}"
    download = f"hf download {quote(name)} --local-dir {quote(directory)}"
    return Noted(directory, f"a model is a directory here: {download}")


def home(path: str) -> str:
    """Return a path with the home directory by its environment variable, which any machine can resolve."""
    return f"${{oc.env:HOME}}{path[1:]}" if path.startswith("~/") else path


def period(value: Any, theirs: Theirs) -> int:
    """Return a period in steps; 0 stands for never, where theirs is below 1 or null."""
    return max(0, int(value or 0))


def is_listed(name: str, on: Any, off: Any) -> Convert:
    """Return a conversion of a list of loggers: ``on`` where it has ``name``, else ``off``."""

    def convert(value: Any, theirs: Theirs) -> Any:
        names = [value] if isinstance(value, str) else value or []
        return on if name in names else off

    return convert


def item(index: int) -> Convert:
    """Return a conversion of a list to one of its items."""
    return lambda value, theirs: value[index]


def all_tokens(value: Any, theirs: Theirs) -> int | None:
    """Return top_k; null stands for all tokens, where theirs is null, 0 or -1."""
    return None if value is None or int(value) < 1 else int(value)


def unless_default(default: Any, remedy: str) -> Convert:
    """Return a conversion for a key that is needed here only where it is not ``default``."""

    def convert(value: Any, theirs: Theirs) -> Any:
        if value == default:
            return LEFT_OUT
        raise Untranslatable(remedy)

    return convert
