"""Writes TensorBoard's event files, without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from nemo_like.config.keys import Key
from nemo_like.observability.logger_kind import LoggerKind
from nemo_like.observability.summary import SampleAnswer


@dataclass(kw_only=True, slots=True)
class TensorboardConfig:
    enabled: Annotated[bool, Key("event files in RUN_DIR/tensorboard", False)]


class TensorboardRecorder:
    """A ``Recorder`` that writes a run's metrics as scalars into an event file in ``directory``."""

    def __init__(self, directory: Path) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory), flush_secs=10)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._writer.add_event(
            self._event(wall_time=time.time(), step=step, summary=self._summary(value=values))
        )

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Do nothing: texts are not kept in TensorBoard."""

    def close(self) -> None:
        self._writer.close()


KIND = LoggerKind(
    about="event files for TensorBoard",
    label="TensorBoard",
    options=TensorboardConfig,
    start=lambda _, run: TensorboardRecorder(run.directory.tensorboard_path),
    is_on=lambda tensorboard: tensorboard.enabled,
    position=2,
)
