"""Computes the numbers that consoles and the summary show, from a run's metrics."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nemo_like.observability.reward_components import reward_components

# Stages of a step that do not overlap, as named under timing/train/. The rest of the step's time is "other".
STEP_STAGES = (
    "weight_sync",
    "generation",
    "logprobs",
    "teacher_logprobs",
    "values",
    "advantage",
    "value_training",
    "policy_training",
)

_TIMING = "timing/train/"
_FAILED_SHARES = {"training": "train/failed_reward_share", "validation": "validation/failed_reward_share"}
_RECENT_STEPS = 10
_SHOWN_PARTS = 8


@dataclass(frozen=True, slots=True)
class StageShare:
    stage: str
    share: float  # of the step's time, 0 to 1


def stage_shares(metrics: Mapping[str, float]) -> list[StageShare]:
    """Return the stages' shares of a step's time, "other" last, leaving out shares below 0.5 %."""
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


def format_failed(metrics: Mapping[str, float], part: str) -> str:
    """Return a text on the share of failed rewards in ``part`` ("train" or "validation"); empty for 0."""
    share = metrics.get(f"{part}/failed_reward_share", 0.0)
    return f"{share:.1%} of the rewards failed" if share else ""


def format_reward_parts(metrics: Mapping[str, float]) -> str:
    """Return the means of the reward's components, such as "format 0.100, right 0.250".

    Returns "" when the reward has one component. With several environments each label begins with the
    environment's name, and an environment with one component has only its name.
    """
    found = reward_components(metrics)
    parts = {}
    for env, components in found.items():
        for name, value in components.items():
            label = name if len(found) == 1 else env if len(components) == 1 else f"{env}/{name}"
            parts[label] = value
    if len(parts) < 2:
        return ""
    shown = [f"{label} {value:.3f}" for label, value in parts.items()]
    more = len(shown) - _SHOWN_PARTS
    return ", ".join(shown[:_SHOWN_PARTS]) + (f", {more} more" if more > 0 else "")


def format_duration(seconds: float) -> str:
    """Return a duration as ``m:ss``, or from one hour on as ``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


class RunProgress:
    """The values that a run has logged so far, and an estimate of the time left."""

    def __init__(self, max_num_steps: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_num_steps = max_num_steps
        self.step = 0
        self.status = ""
        self.metrics: dict[str, float] = {}  # of the latest step
        self.rewards: list[float] = []
        self.accuracies: list[tuple[int, float]] = []  # (step, validation accuracy)
        self.validation_rewards: list[tuple[int, float]] = []  # (step, mean reward of a validation)
        self._failed_shares: dict[str, list[float]] = {}
        self._clock = clock
        self._started_s = clock()
        self._step_ends_s: deque[float] = deque(maxlen=_RECENT_STEPS + 1)

    def numbered(self, step: int) -> str:
        """Return "step 3/80", or "step 3" in a run that does not train."""
        return f"step {step}" if self.is_evaluation else f"step {step}/{self.max_num_steps}"

    @property
    def is_evaluation(self) -> bool:
        """Whether there are no steps: the run only evaluates."""
        return not self.max_num_steps

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started_s

    @property
    def has_partial_rewards(self) -> bool:
        """Whether a validation's mean reward differs from its accuracy: some rewards are not 0 or 1."""
        return bool(self.validation_rewards) and self.validation_rewards != self.accuracies

    @property
    def eta_s(self) -> float | None:
        """Seconds to the last step at the recent pace, validations included; None when unknown."""
        remaining = self.max_num_steps - self.step
        if len(self._step_ends_s) > 1:
            pace_s = (self._step_ends_s[-1] - self._step_ends_s[0]) / (len(self._step_ends_s) - 1)
        else:
            pace_s = self.metrics.get(f"{_TIMING}total_step_time", 0.0)
        return remaining * pace_s if pace_s > 0 else None

    @property
    def failed_shares(self) -> dict[str, float]:
        """The mean share of samples whose reward failed, over the steps and over the validations."""
        return {part: sum(shares) / len(shares) for part, shares in self._failed_shares.items()}

    def forget(self) -> None:
        """Forget the values of all steps; a run that goes back then recalls the steps that still count."""
        self.rewards.clear()
        self.accuracies.clear()
        self.validation_rewards.clear()
        self._failed_shares.clear()

    def recall(self, step: int, metrics: Mapping[str, float]) -> None:
        """Count a step that was logged before this process started, or before the run went back."""
        self.step = step
        self._take(step, metrics)

    def on_step(self, step: int, metrics: Mapping[str, float]) -> None:
        self.step = step
        self.metrics = dict(metrics)
        self._step_ends_s.append(self._clock())
        self._take(step, metrics)

    def on_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._take(step, metrics)

    def _take(self, step: int, metrics: Mapping[str, float]) -> None:
        if "train/reward" in metrics:
            self.rewards.append(metrics["train/reward"])
        if "validation/accuracy" in metrics:
            self.accuracies.append((step, metrics["validation/accuracy"]))
        if "validation/reward" in metrics:
            self.validation_rewards.append((step, metrics["validation/reward"]))
        for part, name in _FAILED_SHARES.items():
            if name in metrics:
                self._failed_shares.setdefault(part, []).append(metrics[name])
