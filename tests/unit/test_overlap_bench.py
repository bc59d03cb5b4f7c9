"""scripts/bench/overlap.py: its latencies, ideals, and how it reads a run."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from pathlib import Path

import pytest

from nemo_like.environments.interface import Turn
from scripts.bench.overlap_bench.runs import (
    StepTimes,
    ideal_s,
    mean_slowest,
    mode_overrides,
    read_bench_run,
    rewritten,
)
from scripts.bench.overlap_bench.slow_tools import SlowTools, latency_s

STEP = StepTimes(generation_s=6.0, overlappable_s=3.0, rest_s=0.5)
BUSY = StepTimes(generation_s=1.0, overlappable_s=3.0, rest_s=0.5)


def turn(prompt: str = "21+43=", number: int = 0, response: str = "640") -> Turn:
    return Turn(prompt=prompt, response=response, answer="640", is_truncated=False, number=number)


def test_a_latency_depends_on_seed_prompt_and_sample_alone() -> None:
    first = latency_s(1, turn(), 0.3, 1.0)
    assert latency_s(1, turn(response="12"), 0.3, 1.0) == first
    assert latency_s(1, turn(), 0.6, 1.0) == pytest.approx(2 * first)
    others = {latency_s(2, turn(), 0.3, 1.0), latency_s(1, turn("1+1="), 0.3, 1.0)}
    assert len({first, latency_s(1, turn(number=1), 0.3, 1.0), *others}) == 4


def test_latencies_are_log_normal() -> None:
    logarithms = [math.log(latency_s(1, turn(number=number), 0.3, 0.5)) for number in range(4000)]
    assert statistics.fmean(logarithms) == pytest.approx(math.log(0.3), abs=0.03)
    assert statistics.stdev(logarithms) == pytest.approx(0.5, abs=0.02)


def test_the_environment_judges_as_the_demos_does() -> None:
    tools = SlowTools(seed=1, median_s=0.0, sigma=1.0)
    answers = asyncio.run(tools.step([turn(), turn(response="641")]))
    assert [answer.reward for answer in answers] == [1.0, 0.0]


def test_the_slowest_of_one_sample_is_a_log_normals_mean() -> None:
    assert mean_slowest(1, 0.5, num_draws=20_000) == pytest.approx(math.exp(0.125), rel=0.02)
    assert mean_slowest(5, 0.0) == 1.0


def test_the_ideal_overlaps_what_may_overlap() -> None:
    assert ideal_s("synchronous", [STEP]) == 9.5
    assert ideal_s("exact", [STEP, BUSY]) == (6.5 + 3.5) / 2
    assert ideal_s("k=1", [STEP]) == 9.5 / 2
    assert ideal_s("k=4", [STEP]) == 3.5


def test_a_mode_is_named_by_its_keys() -> None:
    assert mode_overrides("synchronous") == []
    assert mode_overrides("exact") == ["grpo.overlap=exact"]
    assert mode_overrides("k=2") == ["grpo.max_staleness=2"]


def test_a_run_is_timed_by_its_steps_ends_without_the_first_and_the_last(tmp_path: Path) -> None:
    times = {"generation": 1.0, "logprobs": 0.25, "policy_training": 0.5, "total_step_time": 2.0}
    record = {f"timing/train/{name}": seconds for name, seconds in times.items()}
    record |= {"performance/worker_compute_s": 0.5, "performance/generation_s": 0.25}
    lines = [{"step": 0, "validation/accuracy": 0.25}, *({"step": step, **record} for step in range(1, 7))]
    lines[-1]["validation/accuracy"] = 0.75
    seconds = {1: 10, 2: 20, 3: 30, 4: 32, 5: 34, 6: 50}
    events = [
        {"kind": "step", "time": f"2026-03-01T00:00:{second:02}+00:00", "step": step}
        for step, second in seconds.items()
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    run = read_bench_run(tmp_path)
    assert run.step_s == 2.0
    assert run.steps == (StepTimes(1.0, 0.75, 0.25),) * 2
    assert run.accuracies == [(0, 0.25), (6, 0.75)]
    found = run.as_json()
    assert (found["engine_idle_share"], found["trainer_idle_share"]) == (0.875, 0.75)


def test_a_journal_is_written_again_line_by_line(tmp_path: Path) -> None:
    journal = tmp_path / "driver.jsonl"
    journal.write_text('{"event": "start"}\n{"event": "trained", "step": 1}\n')
    (tmp_path / "again").mkdir()
    num_lines, seconds = rewritten(journal, tmp_path / "again")
    assert num_lines == 2
    assert seconds > 0
    assert (tmp_path / "again" / "driver.jsonl").read_text() == journal.read_text()
