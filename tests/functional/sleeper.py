"""An actor that hangs where it is told to, apart from the tests: its process loads nothing of theirs."""

from __future__ import annotations

import os
import threading

from nemo_like.cluster.actor_errors import Overdue
from nemo_like.cluster.actors import ActorHandle


class Sleeper:
    """Hangs where it is told to."""

    def pid(self) -> int:
        return os.getpid()

    def sleep(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def fetch_from_nowhere(self) -> None:
        threading.Event().wait(60)

    def give_up(self) -> None:
        raise Overdue("column 'prev_logprobs' of sample g3/1 is missing", actors=["other"])

    def ask(self, whom: ActorHandle) -> None:
        whom.submit("give_up").result(30)
