"""Seconds and tokens of an engine, with a clock that is set by hand."""

from __future__ import annotations

import numpy as np
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.generation.engine_tally import EngineActivity, EngineClock, EngineTally
from nemo_like.generation.interface import GroupResult, Response


def response(*versions: int) -> Response:
    zeros = np.zeros(len(versions))
    column = {POLICY_VERSIONS.name: np.array(versions, np.int32)}
    return Response(zeros.astype(np.int32), zeros.astype(np.float32), False, column)


def test_every_second_belongs_to_one_activity_and_the_present_one_counts() -> None:
    now = [10.0]
    tally = EngineTally(EngineClock(lambda: now[0]))
    for activity, seconds in [
        (EngineActivity.idle, 2.0),
        (EngineActivity.decoding, 3.0),
        (EngineActivity.paused, 0.5),
        (EngineActivity.decoding, 1.0),
        (EngineActivity.idle, 4.0),
    ]:
        tally.clock.enter(activity)
        now[0] += seconds
    stats = tally.stats(5)
    assert (stats.policy_version, stats.idle_s, stats.paused_s) == (5, 6.0, 0.5)
    assert tally.clock.seconds(EngineActivity.decoding) == 4.0


def test_tokens_are_counted_under_the_version_that_sampled_each() -> None:
    tally = EngineTally()
    tally.count(GroupResult("mixed", (response(3, 3, 4), response(4)), 4))
    plain = Response(np.zeros(5, np.int32), np.zeros(5, np.float32), False)
    tally.count(GroupResult("plain", (plain,), 3))
    stats = tally.stats(4)
    assert stats.tokens_by_version == {3: 7, 4: 2}
    assert stats.num_generated_tokens == 9


def test_drafts_are_counted_by_how_many_of_their_tokens_were_kept() -> None:
    tally = EngineTally()
    tally.count_drafts(None)
    # Two drafts of which nothing was kept, one with one token, three with two: of 6 drafts with 11 tokens, 7.
    tally.count_drafts(RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[2, 1, 3], num_draft_tokens=11))
    tally.count_drafts(RequestSpecDecodeMetrics(num_spec_tokens=2, histogram=[1, 0, 0], num_draft_tokens=1))
    stats = tally.stats(0)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_kept_draft_tokens) == (7, 12, 7)
