from __future__ import annotations

import signal

from nemo_like.observability.exits import how_it_ended


def test_a_signal_is_named_and_a_code_is_shown() -> None:
    assert how_it_ended(-signal.SIGKILL) == "signal SIGKILL"
    assert how_it_ended(3) == "exit code 3"
