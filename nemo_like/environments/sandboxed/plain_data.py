"""Values that pass between a program and its tests: plain data, as JSON in frames with a length.

None, bool, int, float, str and list are themselves in JSON. Every other plain type is an object with
one key, its name::

    {"tuple": [1, 2]}  {"dict": [["a", 1]]}  {"set": [1]}  {"bytes": "00ff"}  {"complex": [0.0, 1.0]}
    {"range": [0, 9, 2]}  {"iterator": [1, 2]}  {"int": "0x1f..."} where it is large

Python's own iterators are plain too, as long as they end: the values that they yield are sent.
Reading makes new objects of exactly these types and runs no code of the sender.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable
from types import GeneratorType
from typing import Any, BinaryIO

_LENGTH_BYTES = 8
# The most bytes of a program's reply: more than any honest test compares, and a bound on the memory that
# reading it takes.
MAX_FRAME_BYTES = 16_000_000
# Larger integers are sent as hexadecimal digits: decimal ones would take quadratic time.
_MAX_JSON_INT = 2**64
# How many items of an iterator are read; an endless one would fill the memory.
_MAX_ITERATED = 1_000_000
_SEQUENCES: tuple[type, ...] = (tuple, set, frozenset)
_SCALARS = (type(None), bool, int, float, str)
PLAIN_TYPES: tuple[type, ...] = (*_SCALARS, complex, bytes, bytearray, list, dict, *_SEQUENCES, range)
_ITERATORS: tuple[type, ...] = (
    *(GeneratorType, map, filter, zip, enumerate, reversed),
    *map(type, map(iter, ([], (), {}, set(), "", b"", range(0), {}.values(), {}.items()))),
)


class NotPlain(Exception):
    """A value, or something inside it, is of another type; the message is the type's name."""


def write_frame(stream: BinaryIO, tree: Any) -> None:
    """Write a JSON tree and flush. Raises NotPlain when it nests too deeply."""
    try:
        content = json.dumps(tree).encode()
    except RecursionError as error:
        raise NotPlain("value that nests too deeply") from error
    stream.write(len(content).to_bytes(_LENGTH_BYTES, "big") + content)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """Read the next JSON tree.

    Raises EOFError at the end of the stream, ValueError for a frame that is too long or not JSON, and
    RecursionError or MemoryError for one that nests too deeply or is too large.
    """
    header = stream.read(_LENGTH_BYTES)
    length = int.from_bytes(header, "big")
    if len(header) < _LENGTH_BYTES:
        raise EOFError
    if length > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes")
    content = stream.read(length)
    if len(content) < length:
        raise EOFError
    return json.loads(content)


def encode(value: Any, *, simplify: Callable[[Any], Any]) -> Any:
    """Turn a value into a JSON tree; ``simplify`` turns a value of another type into a plain one, or raises
    NotPlain."""
    kind = type(value)
    if kind is int and abs(value) >= _MAX_JSON_INT:
        return {"int": hex(value)}
    if kind in _SCALARS:
        return value
    if kind is list:
        return [encode(item, simplify=simplify) for item in value]
    if kind in _SEQUENCES:
        return {kind.__name__: [encode(item, simplify=simplify) for item in value]}
    if kind is dict:
        return {"dict": [[encode(part, simplify=simplify) for part in pair] for pair in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: value.hex()}
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind in _ITERATORS or kind.__module__ == "itertools":
        return {"iterator": encode(_all_of(value), simplify=simplify)}
    return encode(simplify(value), simplify=simplify)


def _all_of(iterator: Any) -> list[Any]:
    items = list(itertools.islice(iterator, _MAX_ITERATED + 1))
    if len(items) > _MAX_ITERATED:
        raise NotPlain("iterator without end")
    return items


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": lambda digits: int(digits, 16),
    "tuple": lambda items: tuple(decode(items)),
    "set": lambda items: set(decode(items)),
    "frozenset": lambda items: frozenset(decode(items)),
    "dict": lambda pairs: {decode(key): decode(value) for key, value in pairs},
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "complex": lambda parts: complex(*parts),
    "range": lambda ends: range(*ends),
    "iterator": lambda items: iter(decode(items)),
}


def decode(tree: Any) -> Any:
    """Return the value that a JSON tree stands for.

    Raises ValueError, TypeError, KeyError, AttributeError, OverflowError, MemoryError or RecursionError for a
    tree that ``encode`` cannot have made.
    """
    if isinstance(tree, list):
        return [decode(item) for item in tree]
    if isinstance(tree, dict):
        ((name, content),) = tree.items()
        return _DECODERS[name](content)
    return tree


def strict(value: Any) -> Any:
    """Refuse every value whose type is not exactly a plain one: a copy by value would behave differently."""
    raise NotPlain(type(value).__name__)


def lenient(value: Any) -> Any:
    """Reduce instances of subclasses, and numpy's scalars, to the plain value that they equal."""
    for kind in PLAIN_TYPES[2:]:
        if isinstance(value, kind):
            return kind(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        return value.item()
    try:
        return operator.index(value)
    except TypeError:
        raise NotPlain(type(value).__name__) from None
