"""What a person wants to know during a run, worked out from the metrics: shared by every console."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

# Stages of a step that do not overlap, under timing/train/; what they leave is "other".
STEP_STAGES = ("weight_sync", "generation", "logprobs", "advantage", "policy_training")

_TIMING = "timing/train/"
_RECENT_STEPS = 10


@dataclass(frozen=True, slots=True)
class StageShare:
    stage: str
    share: float  # of the step's time, 0 to 1


def stage_shares(metrics: Mapping[str, float]) -> list[StageShare]:
    """Where a step's time went, stages of at least half a per cent, "other" last; empty without timings."""
    total_s = metrics.get(f"{_TIMING}total_step_time", 0.0)
    if total_s <= 0:
        return []
    shares = [
        StageShare(stage, metrics[f"{_TIMING}{stage}"] / total_s)
        for stage in STEP_STAGES
        if f"{_TIMING}{stage}" in metrics
    ]
    shares.append(StageShare("other", max(0.0, 1.0 - sum(item.share for item in shares))))
    return [item for item in shares if item.share >= 0.005]


def format_duration(seconds: float) -> str:
    """``m:ss``, with hours ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunProgress:
    """Latest values of a run, and how long it will still take."""

    def __init__(self, max_num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_num_steps = max_num_steps
        self.step = 0
        self.status = ""
        self.metrics: dict[str, float] = {}  # of the latest step
        self.rewards: list[float] = []
        self.accuracies: list[tuple[int, float]] = []  # (step, validation accuracy)
        self._clock = clock
        self._started_s = clock()
        self._step_ends_s: deque[float] = deque(maxlen=_RECENT_STEPS + 1)

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the recent pace, validations between steps included."""
        remaining = self.max_num_steps - self.step
        if len(self._step_ends_s) > 1:
            pace_s = (self._step_ends_s[-1] - self._step_ends_s[0]) / (len(self._step_ends_s) - 1)
        else:
            pace_s = self.metrics.get(f"{_TIMING}total_step_time", 0.0)
        return remaining * pace_s if pace_s > 0 else None

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.metrics = dict(metrics)
        self._step_ends_s.append(self._clock())
        if "train/reward" in metrics:
            self.rewards.append(metrics["train/reward"])

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        if "validation/accuracy" in metrics:
            self.accuracies.append((step, metrics["validation/accuracy"]))
