"""``Pickled``: a value that is pickled once and sent to several processes."""

from __future__ import annotations

import pickle
from typing import Any


class Pickled:
    """A wrapped argument for calls to several actors; each actor receives the value itself.

    The value is pickled once, in the constructor, and every call copies the bytes: pickling the metadata of
    thousands of samples takes longer than copying it.
    """

    def __init__(self, value: Any) -> None:
        self._data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)
