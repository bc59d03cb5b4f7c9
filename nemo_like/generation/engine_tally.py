"""Measures an engine: the seconds of each of its activities, and the tokens that it delivered."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np

from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.generation.interface import EngineStats, GroupResult


class EngineActivity(Enum):
    decoding = "decoding"
    idle = "idle"  # nothing to decode, and no weights to wait for
    paused = "paused"  # for weights, until they are loaded


class EngineClock:
    """Adds up the seconds of each activity; at any time an engine is in exactly one."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start in ``idle``; ``now`` returns the time in seconds."""
        self._now = now
        self._seconds = dict.fromkeys(EngineActivity, 0.0)
        self._activity, self._since_s = EngineActivity.idle, now()

    def enter(self, activity: EngineActivity) -> None:
        """Begin an activity, which ends the current activity."""
        now_s = self._now()
        self._seconds[self._activity] += now_s - self._since_s
        self._activity, self._since_s = activity, now_s

    def seconds(self, activity: EngineActivity) -> float:
        """Return the seconds of an activity so far."""
        self.enter(self._activity)
        return self._seconds[activity]


@dataclass(slots=True)
class EngineTally:
    """Totals since the engine started."""

    clock: EngineClock = field(default_factory=EngineClock)
    generation_s: float = 0.0  # in steps
    draining_s: float = 0.0  # in steps in which samples ended and none began, for weights
    num_tokens: Counter[int] = field(default_factory=Counter)  # of delivered responses, by policy version
    num_drafts: int = 0  # of delivered responses, like the two below
    num_draft_tokens: int = 0
    num_kept_draft_tokens: int = 0

    def count(self, result: GroupResult) -> None:
        """Count the tokens of a group that is delivered."""
        for response in result.responses:
            versions = response.columns.get(POLICY_VERSIONS.name)
            if versions is None:
                self.num_tokens[result.policy_version] += len(response.token_ids)
            else:
                numbers, counts = np.unique(versions, return_counts=True)
                self.num_tokens.update(dict(zip(numbers.tolist(), counts.tolist(), strict=True)))

    def count_drafts(self, drafts: Any) -> None:
        """Count the drafts of a delivered response. ``drafts`` is vLLM's ``spec_decode_metrics``: entry n of
        its ``histogram`` is the number of drafts with n tokens kept. None: there were no drafts."""
        if drafts is not None:
            self.num_drafts += sum(drafts.histogram)
            self.num_draft_tokens += drafts.num_draft_tokens
            self.num_kept_draft_tokens += sum(kept * times for kept, times in enumerate(drafts.histogram))

    def stats(self, policy_version: int) -> EngineStats:
        return EngineStats(
            policy_version=policy_version,
            generation_s=self.generation_s,
            num_generated_tokens=self.num_tokens.total(),
            idle_s=self.clock.seconds(EngineActivity.idle),
            paused_s=self.clock.seconds(EngineActivity.paused),
            draining_s=self.draining_s,
            tokens_by_version=dict(self.num_tokens),
            num_drafts=self.num_drafts,
            num_draft_tokens=self.num_draft_tokens,
            num_kept_draft_tokens=self.num_kept_draft_tokens,
        )
