"""Values that travel to several processes."""

from __future__ import annotations

import pickle
from typing import Any

from nemo_like.cluster.pickled import Pickled


class Counted:
    """Counts how often it was pickled."""

    num_pickled = 0

    def __reduce__(self) -> tuple[Any, ...]:
        Counted.num_pickled += 1
        return tuple, ((1, 2),)


def test_a_value_is_pickled_once_and_every_receiver_gets_the_value_itself() -> None:
    value = Pickled(Counted())
    received = [pickle.loads(pickle.dumps(("train", value))) for _ in range(3)]
    assert received == [("train", (1, 2))] * 3
    assert Counted.num_pickled == 1
