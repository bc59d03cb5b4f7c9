"""The live view of a run: a panel at the bottom of the terminal, redrawn in place."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from typing import TextIO

from rich.console import Console as Terminal
from rich.live import Live

from nemo_like.config.secrets import masked
from nemo_like.observability.printable import printable
from nemo_like.observability.progress import RunProgress
from nemo_like.observability.run_panel import RunPanel
from nemo_like.observability.terminal_echo import without_control_echo

_REFRESHES_PER_SECOND = 4


class LiveConsole:
    """A console that shows step, reward, accuracy, speed, stages' shares of a step's time, and time left."""

    def __init__(self, stream: TextIO, run_name: str, progress: RunProgress) -> None:
        self._progress = progress
        self._terminal = Terminal(file=stream, force_terminal=True)
        self._live = Live(
            console=self._terminal,
            get_renderable=RunPanel(run_name, progress).render,
            refresh_per_second=_REFRESHES_PER_SECOND,
            transient=True,
        )
        self._quiet = ExitStack()
        self._quiet.enter_context(without_control_echo(stream))
        self._live.start()

    def status(self, text: str) -> None:
        self._progress.status = text

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics)
        self._progress.status = ""

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_validation(step, metrics)
        self._progress.status = ""

    def note(self, text: str) -> None:
        self._terminal.print(printable(masked(text)), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._live.stop()
        self._quiet.close()
