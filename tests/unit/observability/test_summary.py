from __future__ import annotations

from nemo_like.observability.progress import RunProgress
from nemo_like.observability.summary import RunSummary, SampleAnswer, format_summary


def progress(num_steps=2):
    times_s = iter([0.0, *range(1, num_steps + 1), 75.0])
    result = RunProgress(max_num_steps=80, clock=lambda: next(times_s))
    for step in range(1, num_steps + 1):
        result.on_step(step, {"train/reward": 0.25 * step})
    return result


def test_the_summary_reads_exactly_so():
    run = progress()
    run.on_validation(0, {"validation/accuracy": 0.25})
    run.on_validation(2, {"validation/accuracy": 0.875})
    summary = RunSummary(
        outcome="finished",
        sample_answers=[
            SampleAnswer("21+43=", "640", "640", 1.0),
            SampleAnswer("5+5=", "11", "01", 0.0),
        ],
        paths={"final checkpoint": "/runs/demo/final_hf"},
    )
    assert format_summary(summary, run, {"metrics": "/runs/demo/metrics.jsonl"}) == [
        "",
        "The run finished. 2 of 80 steps in 1:15.",
        "",
        "held-out accuracy  0.250 -> 0.875",
        "training reward    0.250 -> 0.500",
        "",
        "Answers to held-out problems:",
        "  21+43=  640  right",
        "  5+5=    11  wrong, expected 01",
        "",
        "metrics           /runs/demo/metrics.jsonl",
        "final checkpoint  /runs/demo/final_hf",
    ]


def test_a_run_that_failed_before_its_first_step_says_so():
    run = RunProgress(max_num_steps=80, clock=lambda: 0.0)
    lines = format_summary(RunSummary(outcome="failed: an actor died"), run, {"logs": "/runs/demo/logs"})
    assert lines == ["", "The run failed: an actor died. 0 of 80 steps in 0:00.", "", "logs  /runs/demo/logs"]
