"""Formats the summary that a run prints at its end: its results, a few answers, and where everything is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.observability.progress import RunProgress, format_duration

# Characters shown of a prompt, of a response and of a reference answer; W&B gets the whole texts.
_SHOWN_CHARACTERS = 100


@dataclass(frozen=True, slots=True)
class SampleAnswer:
    """One answer of a validation, as text. The response continues the prompt."""

    prompt: str
    response: str
    answer: str  # the reference; may be empty
    reward: float | None  # None: the environment could not judge it
    is_solved: bool  # the reward is at least grpo.val_solved_reward
    failure: str | None = None  # why there is no reward


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """How a run ended; ``outcome`` completes the sentence "the run ...", or "the evaluation ..."."""

    outcome: str  # "finished", "was interrupted", "failed: ..."
    exit_code: int = 0  # of run_grpo.py
    sample_answers: Sequence[SampleAnswer] = ()
    paths: Mapping[str, str] = field(default_factory=dict)  # more results, label to path


def format_summary(summary: RunSummary, progress: RunProgress, paths: Mapping[str, str]) -> list[str]:
    """Return the lines of the summary, without the closing ``run_dir`` line."""
    took = format_duration(progress.elapsed_s)
    if progress.is_evaluation:
        lines, results = ["", f"The evaluation {summary.outcome}. It took {took}."], _failed(progress)
    else:
        steps = f"{progress.step} of {progress.max_num_steps} steps"
        lines, results = ["", f"The run {summary.outcome}. {steps} in {took}."], _results(progress)
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
    if progress.has_partial_rewards:
        (_, first), (_, last) = progress.validation_rewards[0], progress.validation_rewards[-1]
        change = f"{first:.3f} -> {last:.3f}" if len(progress.validation_rewards) > 1 else f"{last:.3f}"
        results["held-out reward"] = change
    if progress.rewards:
        results["training reward"] = f"{progress.rewards[0]:.3f} -> {progress.rewards[-1]:.3f}"
    return results | _failed(progress)


def _failed(progress: RunProgress) -> dict[str, str]:
    if not any(progress.failed_shares.values()):
        return {}
    of_parts = (f"{share:.1%} in {part}" for part, share in progress.failed_shares.items())
    return {"failed rewards": ", ".join(of_parts)}


def _answers(answers: Sequence[SampleAnswer]) -> list[str]:
    texts = [" ".join(f"{_shortened(item.prompt)}{_shortened(item.response)}".split()) for item in answers]
    width = max(map(len, texts))
    return [f"  {text:<{width}}  {_verdict(item)}" for text, item in zip(texts, answers, strict=True)]


def _verdict(item: SampleAnswer) -> str:
    """Return whether the answer is right, and the reward itself when it is neither 0 nor 1."""
    if item.reward is None:
        return f"not judged: {item.failure}"
    reward = f"reward {item.reward:.4g}"
    if item.is_solved:
        return "right" if item.reward == 1.0 else f"right, {reward}"
    expected = f", expected {_shortened(item.answer)}" if item.answer else ""
    return f"wrong{expected}" if item.reward == 0.0 else f"{reward}{expected}"


def _shortened(text: str) -> str:
    """Return the text; a long text loses its middle."""
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    return f"{text[:half]} ... {text[-half:]}"


def _aligned(entries: Mapping[str, str]) -> list[str]:
    width = max(map(len, entries), default=0)
    return [f"{label:<{width}}  {value}" for label, value in entries.items()]
