"""``run_grpo.py`` that gets a Ctrl-C as soon as its processes would start, and another while results are
written."""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import run_grpo
from nemo_like.driver import setup
from nemo_like.observability.logger import RunLogger


def _press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def main() -> int:
    finish = RunLogger.finish

    def finish_and_interrupt(logger: RunLogger, *args: Any) -> None:
        _press_ctrl_c()
        finish(logger, *args)

    def start_and_interrupt(*_: Any) -> None:
        _press_ctrl_c()

    setup.started = start_and_interrupt  # type: ignore[assignment]
    RunLogger.finish = finish_and_interrupt  # type: ignore[method-assign]
    return run_grpo.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
