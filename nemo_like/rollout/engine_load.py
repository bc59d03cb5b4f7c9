"""Measures how busy the engines were, from their own clocks, at the end of each training rollout."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence

from nemo_like.cluster.actors import ActorHandle
from nemo_like.generation.interface import EngineStats
from nemo_like.observability.metrics import Metric, mean, summed


class EngineLoad:
    """Measures what share of the time the engines idled, paused or drained, from the end of one training
    rollout to the end of the next."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start the clock; ``now`` returns the time in seconds."""
        self._now = now
        self._read_s = now()
        self._before: dict[str, EngineStats] = {}
        self._num_running = 0
        self._all_ended_s: float | None = None  # when the last rollout under way ended
        self._waited_s = 0.0

    def begun(self) -> None:
        """Note that a rollout begins."""
        if not self._num_running and self._all_ended_s is not None:
            self._waited_s += self._now() - self._all_ended_s
        self._num_running += 1

    def ended(self) -> None:
        """Note that a rollout has ended, well or not."""
        self._num_running -= 1
        self._all_ended_s = self._now()

    async def metrics(self, engines: Sequence[ActorHandle]) -> dict[str, Metric]:
        """Return the shares since the last call, each a mean over the engines, and for how many seconds no
        rollout was under way because the next one was not to begin yet.

        A new engine has no shares yet. With draft models, also return how many draft tokens were kept since
        the last call.
        """
        all_stats: list[EngineStats] = await asyncio.gather(*(one.submit("stats") for one in engines))
        stats = {engine.name: one for engine, one in zip(engines, all_stats, strict=True)}
        now_s = self._now()
        elapsed_s, self._read_s = now_s - self._read_s, now_s
        waited_s, self._waited_s = self._waited_s, 0.0
        known = [(self._before[name], one) for name, one in stats.items() if name in self._before]
        drafts = _draft_metrics([(self._before.get(name), one) for name, one in stats.items()])
        self._before = stats
        total_s = elapsed_s * len(known)
        shares = {
            "engine_idle_share": sum(new.idle_s - old.idle_s for old, new in known),
            "engine_paused_share": sum(new.paused_s - old.paused_s for old, new in known),
            "engine_draining_share": sum(new.draining_s - old.draining_s for old, new in known),
        }
        return {
            "backpressure_s": summed(waited_s),
            **{name: mean(seconds, total_s) for name, seconds in shares.items() if total_s > 0},
            **drafts,
        }


def _draft_metrics(stats: Sequence[tuple[EngineStats | None, EngineStats]]) -> dict[str, Metric]:
    """Return what share of their draft tokens the engines kept, and how many tokens a draft gave; empty
    without drafts.

    stats: for each engine its statistics at the last call, None for a new engine, and its present ones.
    """
    none = EngineStats(policy_version=0, generation_s=0.0, num_generated_tokens=0)
    pairs = [(before or none, now) for before, now in stats]
    drafts, drafted, kept = (
        sum(getattr(now, name) - getattr(before, name) for before, now in pairs)
        for name in ("num_drafts", "num_draft_tokens", "num_kept_draft_tokens")
    )
    if not drafts:
        return {}
    return {
        "draft_acceptance_rate": mean(kept, drafted),
        # The policy's pass over a draft gives one token of its own besides.
        "draft_acceptance_length": mean(kept + drafts, drafts),
    }
