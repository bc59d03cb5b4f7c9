"""In which steps the more expensive checks run with ``debug.tripwires=cheap``. Standard library only."""

from __future__ import annotations

from nemo_like.tripwires.options import Tripwires

_FIRST = 3
_PERIOD = 10


def is_due(number: int, level: Tripwires) -> bool:
    """Return whether a check is due at the ``number``-th occasion since the start of the process, counted
    from 1.

    With ``all`` every occasion is due; with ``cheap`` the first three and then every tenth: what is wrong in
    the code is wrong from the start, and what goes wrong later is seen soon enough.
    """
    if level is Tripwires.cheap:
        return number <= _FIRST or number % _PERIOD == 0
    return level is Tripwires.all
