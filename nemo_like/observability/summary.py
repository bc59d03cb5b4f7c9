"""The last screen of a run: what was reached, a few answers to look at, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.observability.progress import RunProgress, format_duration


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """One validation answer in words."""

    prompt: str
    response: str
    answer: str
    reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended; ``outcome`` completes the sentence "the run ..."."""

    outcome: str  # "finished", "was interrupted", "failed: ..."
    sample_answers: Sequence[SampleAnswer] = ()
    paths: Mapping[str, str] = field(default_factory=dict)  # more results, label to path


def format_summary(summary: RunSummary, progress: RunProgress, paths: Mapping[str, str]) -> list[str]:
    """Lines of the summary, without the closing ``run_dir`` line."""
    steps = f"{progress.step} of {progress.max_num_steps} steps"
    lines = ["", f"The run {summary.outcome}. {steps} in {format_duration(progress.elapsed_s)}."]
    results = _results(progress)
    if results:
        lines += ["", *_aligned(results)]
    if summary.sample_answers:
        lines += ["", "Answers to held-out problems:", *_answers(summary.sample_answers)]
    return [*lines, "", *_aligned({**paths, **summary.paths})]


def _results(progress: RunProgress) -> dict[str, str]:
    results = {}
    if progress.accuracies:
        (_, first), (_, last) = progress.accuracies[0], progress.accuracies[-1]
        change = f"{first:.3f} -> {last:.3f}" if len(progress.accuracies) > 1 else f"{last:.3f}"
        results["held-out accuracy"] = change
    if progress.rewards:
        results["training reward"] = f"{progress.rewards[0]:.3f} -> {progress.rewards[-1]:.3f}"
    return results


def _answers(answers: Sequence[SampleAnswer]) -> list[str]:
    width = max(len(answer.prompt) for answer in answers)
    return [
        f"  {item.prompt:<{width}}  {item.response}"
        + ("  right" if item.reward > 0 else f"  wrong, expected {item.answer}")
        for item in answers
    ]


def _aligned(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"{label:<{width}}  {value}" for label, value in entries.items()]
