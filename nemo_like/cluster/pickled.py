"""Values that travel to several processes."""

from __future__ import annotations

import pickle
from typing import Any


class Pickled:
    """An argument of calls to several actors. It is pickled when it is made, however many calls get it; each
    actor receives the value itself.

    Pickling the metadata of thousands of samples takes longer than copying the bytes.
    """

    def __init__(self, value: Any) -> None:
        self._data = pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (self._data,)
