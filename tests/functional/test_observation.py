"""Traces, profiles and TensorBoard of a real run."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from typing import Any

import pytest

from tests.functional.runs import FinishedRun

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]


@pytest.fixture(scope="module")
def spans(demo: FinishedRun) -> dict[str, list[dict[str, Any]]]:
    """Drawn events of the traced step by process."""
    events = json.loads((demo.run_dir / "trace_step_2.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    by_process = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            by_process[names[event["pid"]]].append(event)
    return by_process


def named(events: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """(start, end) in microseconds."""
    return [(event["ts"], event["ts"] + event["dur"]) for event in events if event["name"] == name]


def test_the_trace_has_every_process_and_what_it_did(spans: dict[str, list[dict[str, Any]]]) -> None:
    does = {process: {event["name"] for event in events} for process, events in spans.items()}
    assert does["driver"] >= {
        "total_step_time", "weight_sync", "generation", "logprobs", "policy_training",
    }  # fmt: skip
    assert does["rollout"] >= {"begin", "next_part", "generation", "flatten", "put"}
    for engine in ("engine-0", "engine-1"):
        assert does[engine] >= {"generate", "fetch_weights", "load_weights"}
    assert does["environment"] >= {"step"}
    assert does["policy_worker-0"] >= {"fetch", "compute", "write", "send", "train", "push_weights"}
    assert does["policy_worker-1"] >= {"fetch", "compute", "write", "train"}
    assert "send" not in does["policy_worker-1"]


def test_the_processes_share_a_time_line(spans: dict[str, list[dict[str, Any]]]) -> None:
    # Then the step asks whether further groups come; without dynamic sampling there are none.
    (generation_start, generation_end), _ = named(spans["driver"], "generation")
    for engine in ("engine-0", "engine-1"):
        for start, end in named(spans[engine], "generate"):
            assert generation_start <= start <= end <= generation_end
    ((training_start, training_end),) = named(spans["driver"], "policy_training")
    for worker in ("policy_worker-0", "policy_worker-1"):
        ((start, end),) = named(spans[worker], "train")
        assert training_start <= start <= end <= training_end


def test_only_the_steps_and_processes_that_were_asked_for_are_written(demo: FinishedRun) -> None:
    assert [path.name for path in demo.run_dir.glob("trace_step_*")] == ["trace_step_2.json"]
    profiles = [str(path.relative_to(demo.run_dir)) for path in demo.run_dir.glob("profiles/*/*")]
    assert profiles == ["profiles/step_2/policy_worker-1.json.gz"]


def test_the_profile_has_the_operators_of_the_backward_pass(demo: FinishedRun) -> None:
    with gzip.open(demo.run_dir / "profiles/step_2/policy_worker-1.json.gz", "rt") as file:
        names = {str(event.get("name")) for event in json.load(file)["traceEvents"]}
    assert "compute" in names
    assert "aten::mm" in names
    assert any("Backward" in name for name in names)


def test_tensorboard_has_every_step(demo: FinishedRun) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    (path,) = (demo.run_dir / "tensorboard").iterdir()
    rewards = {
        event.step: value.tensor.float_val[0]
        for event in EventFileLoader(str(path)).Load()
        for value in event.summary.value
        if value.tag == "train/reward"
    }
    assert rewards == pytest.approx(
        {r["step"]: r["train/reward"] for r in demo.records() if "train/reward" in r}
    )
