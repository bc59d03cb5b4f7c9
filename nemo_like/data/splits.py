"""Parts of datasets by name and by number of rows, in the notation of ``datasets``: ``train[:100]``."""

from __future__ import annotations

import re
from collections.abc import Mapping

_NAME = re.compile(r"\w+(\.\w+)*")


def is_name(split: str) -> bool:
    """Return whether a split is only a name, and so means the complete part of that name."""
    return _NAME.fullmatch(split) is not None


def only_name(split: str, path: str) -> str:
    """Return the name before every slice of a split; a file is a single part and may have any name.

    Raises ValueError when there are several names.
    """
    names = _names(split)
    if len(names) > 1:
        raise ValueError(
            f"data.*.split={split!r} names {len(names)} parts, and {path!r} is a single one; name one, or "
            "make the others sources of their own"
        )
    return names[0]


def _names(split: str) -> list[str]:
    return list(dict.fromkeys(one.partition("[")[0].strip() for one in split.split("+")))


def chosen_rows(split: str, sizes: Mapping[str, int], path: str) -> list[tuple[str, range]]:
    """Return which rows of which part a split chooses, in its order; ``sizes`` maps the parts' names to their
    numbers of rows.

    Slices are ``train[:100]``, ``train[-50:]``, ``train[10%:20%]`` and sums of them with ``+``. Raises
    ValueError, naming ``path``, for any other text and for a missing part.
    """
    from datasets import ReadInstruction

    for name in _names(split):
        if name not in sizes:
            raise ValueError(
                f"data.*.split={name!r} is not in {path!r}, which has {', '.join(sorted(sizes))}"
            )
    try:
        parts = ReadInstruction.from_spec(split).to_absolute(dict(sizes))
    except ValueError as error:
        raise ValueError(
            f"data.*.split={split!r} cannot be read from {path!r}: {error}; write train[:100] or "
            "train[10%:20%] for example"
        ) from error
    return [(part.splitname, range(part.from_, part.to)) for part in parts]
