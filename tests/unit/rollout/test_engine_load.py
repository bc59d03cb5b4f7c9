"""What the engines' own clocks and counts say of a rollout."""

from __future__ import annotations

import asyncio
from typing import Any

from nemo_like.generation.interface import EngineStats
from nemo_like.observability.metrics import Metric
from nemo_like.rollout.engine_load import EngineLoad


class Engine:
    """An engine that has counted so far what a test says."""

    def __init__(self, name: str, **counts: Any) -> None:
        self.name, self.counts = name, counts

    async def submit(self, method: str) -> EngineStats:
        assert method == "stats"
        return EngineStats(policy_version=0, generation_s=0.0, num_generated_tokens=0, **self.counts)


def metrics(load: EngineLoad, *engines: Engine) -> dict[str, Metric]:
    return asyncio.run(load.metrics(engines))  # type: ignore[arg-type]


def test_drafts_are_those_since_the_last_rollout_and_all_of_a_new_engine() -> None:
    load = EngineLoad()
    first = Engine("one", num_drafts=10, num_draft_tokens=30, num_kept_draft_tokens=15)
    found = metrics(load, first)
    assert (found["draft_acceptance_rate"].value, found["draft_acceptance_length"].value) == (0.5, 2.5)
    first.counts = {"num_drafts": 14, "num_draft_tokens": 42, "num_kept_draft_tokens": 18}
    new = Engine("two", num_drafts=2, num_draft_tokens=4, num_kept_draft_tokens=3)
    found = metrics(load, first, new)
    assert (found["draft_acceptance_rate"].value, found["draft_acceptance_length"].value) == (6 / 16, 2.0)


def test_engines_that_draft_nothing_have_no_metrics_of_drafts() -> None:
    load = EngineLoad()
    for _ in range(2):
        assert not [name for name in metrics(load, Engine("one")) if name.startswith("draft")]


def test_shares_are_of_the_time_since_the_last_rollout() -> None:
    now = [0.0]
    load = EngineLoad(lambda: now[0])
    engine = Engine("one", idle_s=1.0)
    assert set(metrics(load, engine)) == {"backpressure_s"}
    now[0], engine.counts = 8.0, {"idle_s": 3.0, "paused_s": 1.0}
    found = metrics(load, engine)
    assert (found["engine_idle_share"].value, found["engine_paused_share"].value) == (0.25, 0.125)
