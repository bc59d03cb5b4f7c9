from __future__ import annotations

from nemo_like.observability.progress import RunProgress
from nemo_like.observability.summary import RunSummary, SampleAnswer, format_summary


def progress(num_steps=2):
    times_s = iter([0.0, *range(1, num_steps + 1), 75.0, 75.0, 75.0])
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
            SampleAnswer("12+34=", "46", "46", 1.0, True),
            SampleAnswer("5+5=", "11", "10", 0.0, False),
            SampleAnswer("6+6=", "21", "21", None, False, "the reward raised KeyError: 'x'"),
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
        "  12+34=46  right",
        "  5+5=11    wrong, expected 10",
        "  6+6=21    not judged: the reward raised KeyError: 'x'",
        "",
        "metrics           /runs/demo/metrics.jsonl",
        "final checkpoint  /runs/demo/final_hf",
    ]


def test_failed_rewards_are_shown_with_their_share_where_there_were_any():
    run = progress()
    for share in (0.0, 0.25):
        run.on_step(3, {"train/failed_reward_share": share})
    run.on_validation(3, {"validation/failed_reward_share": 0.0})
    lines = format_summary(RunSummary(outcome="finished"), run, {})
    assert "failed rewards   12.5% in training, 0.0% in validation" in lines


def answer_lines(*answers):
    lines = format_summary(RunSummary(outcome="finished", sample_answers=answers), progress(), {})
    return [line for line in lines if line.startswith("  ")]


def test_a_reward_that_is_neither_right_nor_wrong_is_named():
    assert answer_lines(
        SampleAnswer("a?", " yes", "yes it is", 0.4, False),
        SampleAnswer("b?", " no", "", -0.5, False),
        SampleAnswer("c?", " well", "", 0.0, False),
        SampleAnswer("d?", " indeed", "yes", 2.5, True),
    ) == [
        "  a? yes     reward 0.4, expected yes it is",
        "  b? no      reward -0.5",
        "  c? well    wrong",
        "  d? indeed  right, reward 2.5",
    ]


def test_a_long_answer_is_one_line_with_its_beginning_and_its_end():
    (line,) = answer_lines(SampleAnswer("Think.\n", "so\n" * 100 + "the end", "42", 0.0, False))
    assert line.startswith("  Think. so so")
    assert line.endswith("so the end  wrong, expected 42")
    assert " ... " in line
    assert len(line) < 200


def test_the_mean_reward_is_shown_beside_the_accuracy_where_they_differ():
    run = progress()
    run.on_validation(0, {"validation/accuracy": 0.25, "validation/reward": 0.25})
    assert not any("held-out reward" in line for line in format_summary(RunSummary(outcome="ended"), run, {}))
    run = progress()
    run.on_validation(0, {"validation/accuracy": 0.25, "validation/reward": 0.5})
    run.on_validation(2, {"validation/accuracy": 0.75, "validation/reward": 0.875})
    lines = format_summary(RunSummary(outcome="ended"), run, {})
    assert "held-out accuracy  0.250 -> 0.750" in lines
    assert "held-out reward    0.500 -> 0.875" in lines


def test_a_run_that_failed_before_its_first_step_says_so():
    run = RunProgress(max_num_steps=80, clock=lambda: 0.0)
    lines = format_summary(RunSummary(outcome="failed: an actor died"), run, {"logs": "/runs/demo/logs"})
    assert lines == ["", "The run failed: an actor died. 0 of 80 steps in 0:00.", "", "logs  /runs/demo/logs"]
