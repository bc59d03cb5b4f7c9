"""A simulated engine, by hand."""

from __future__ import annotations

import pytest

from nemo_like.algorithms.options import WeightUpdates
from nemo_like_tools.what_if.clock import Clock, Process, Signal
from nemo_like_tools.what_if.engine import SampledTokens, SimulatedEngine
from nemo_like_tools.what_if.workload import EngineSpeed, Mode

IN_FLIGHT = Mode(max_staleness=1, weight_updates=WeightUpdates.in_flight)
BETWEEN = Mode(max_staleness=1)


class Bench:
    """An engine on a clock, which notes when what ends."""

    def __init__(self, mode: Mode = BETWEEN, **speed: float) -> None:
        self.clock, self.sampled = Clock(), SampledTokens()
        values = {"request_s": 0.0, "token_s": 1.0, "token_per_sequence_s": 0.0, "max_num_seqs": 8, **speed}
        self.engine = SimulatedEngine(self.clock, EngineSpeed(**values), mode, self.sampled)
        self.ends: dict[str, float] = {}

    def submit(self, name: str, *lengths: int, step: int = 1, at_s: float = 0.0) -> None:
        def note() -> None:
            self.ends[name] = round(self.clock.now_s, 9)

        self.clock.at(at_s, lambda: self.engine.submit(step, list(lengths), note))

    def bring_weights(self, version: int, at_s: float, seconds: float) -> None:
        def bring() -> Process:
            paused = Signal()
            self.engine.pause(paused.fire)
            yield paused
            self.ends[f"paused for {version}"] = round(self.clock.now_s, 9)
            yield seconds
            self.engine.resume(version)

        self.clock.at(at_s, lambda: self.clock.start(bring()))


def test_a_sequence_takes_the_request_and_its_tokens() -> None:
    bench = Bench(request_s=0.5, token_s=0.1)
    bench.submit("one", 10)
    bench.clock.run()
    assert bench.ends == {"one": 1.5}
    assert bench.engine.busy_s == pytest.approx(1.5)


def test_sequences_slow_each_other_while_both_run() -> None:
    # Two run at 0.3 s a token until the short one has its 2 tokens, at 0.6 s; the other's last 2 take 0.2 s
    # each.
    bench = Bench(token_s=0.1, token_per_sequence_s=0.1)
    bench.submit("short", 2)
    bench.submit("long", 4)
    bench.clock.run()
    assert bench.ends == {"short": 0.6, "long": 1.0}


def test_a_request_ends_with_its_longest_response() -> None:
    bench = Bench()
    bench.submit("group", 2, 5, 3)
    bench.clock.run()
    assert bench.ends == {"group": 5.0}


def test_requests_wait_for_room_in_the_order_in_which_they_came() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("first", 3, step=1)
    bench.submit("later step", 2, step=3, at_s=1.0)
    bench.submit("next step", 2, step=2, at_s=2.0)
    bench.clock.run()
    assert bench.ends == {"first": 3.0, "later step": 5.0, "next step": 7.0}


def test_between_samples_what_runs_ends_before_the_weights_come() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("runs", 4, step=2)
    bench.submit("waits", 2, step=2)
    bench.bring_weights(1, at_s=1.0, seconds=0.5)
    bench.clock.run()
    assert bench.ends == {"runs": 4.0, "paused for 1": 4.0, "waits": 6.5}
    # "runs" was sampled by version 0, one version before its step's; "waits" by version 1.
    assert bench.sampled.by_staleness == {1: 4.0, 0: 2.0}


def test_in_flight_what_runs_stands_still_and_goes_on_with_the_new_weights() -> None:
    bench = Bench(IN_FLIGHT)
    bench.submit("runs", 4, step=2)
    bench.bring_weights(1, at_s=1.0, seconds=0.5)
    bench.clock.run()
    assert bench.ends == {"paused for 1": 1.0, "runs": 4.5}
    assert bench.sampled.by_staleness == {1: 1.0, 0: 3.0}
    assert bench.engine.busy_s == pytest.approx(4.0)
