"""Records a run in TensorBoard's event files, without TensorFlow or torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_like.observability.summary import SampleAnswer


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
