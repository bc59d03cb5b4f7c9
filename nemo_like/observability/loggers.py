"""Finds the loggers that a configuration asks for: shipped ones that are switched on, and the user's own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.config import fields
from nemo_like.observability.background import BackgroundLogger
from nemo_like.observability.logger_kind import LoggedRun, LoggerKind
from nemo_like.observability.options import LOGGER_KINDS, LoggerConfig, shipped_loggers


@dataclass(frozen=True, slots=True)
class ChosenLogger:
    """A logger that is on."""

    name: str
    key: str  # the full key of its options
    kind: LoggerKind
    options: Any  # an instance of ``kind.options``

    def start(self, run: LoggedRun) -> BackgroundLogger:
        """Start the logger on a thread of its own."""
        return BackgroundLogger(
            self.kind.label or self.name,
            lambda: self.kind.start(self.options, run),
            give_up=self.kind.give_up,
        )

    def results(self, run: LoggedRun) -> Mapping[str, str]:
        """Return where the logger keeps the run's metrics, by label.

        When the user's code raises, the error stands in that place: the run itself has ended well.
        """
        try:
            return {} if self.kind.results is None else self.kind.results(self.options, run)
        except Exception as error:
            return {self.kind.label or self.name: f"unknown: {type(error).__name__}: {error}"}


def chosen_loggers(cfg: LoggerConfig) -> Iterator[ChosenLogger]:
    """Yield the loggers that are on, the shipped ones first. The keys of the user's own must be valid."""
    for name, kind in shipped_loggers().items():
        options = getattr(cfg, name)
        if kind.is_on is None or kind.is_on(options):
            yield ChosenLogger(name, f"logger.{name}", kind, options)
    for name, own in cfg.own.items():
        own_kind: LoggerKind = LOGGER_KINDS.load(own.kind)
        yield ChosenLogger(name, own_key(name), own_kind, fields.typed(own.options, own_kind.options))


def own_key(name: str) -> str:
    """Return the full key of the options of the user's own logger ``name``."""
    return f"logger.own.{name}.options"
