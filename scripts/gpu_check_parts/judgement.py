"""Says what is off, in sentences with the value and the limit. Pure; docs/how_to/gpu_check.md states the
limits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scripts.gpu_check_parts.memory import Peak
from scripts.gpu_check_parts.outcomes import TestCounts
from scripts.gpu_check_parts.run_files import Record
from scripts.gpu_check_parts.settings import GIB

# In bfloat16 on a CPU the demo ended at 0.91; the rest is room for another order of sums.
MIN_ACCURACY = 0.8
# As the tripwire `agreement` has it for bfloat16; on a CPU the demo's steps were below 1.01.
MAX_MISMATCH = 1.05
# Memory above the timetable by this share and these bytes; the timetable's contexts are an assumption.
MEMORY_SHARE, MEMORY_SLACK = 0.15, GIB // 2
# What a GPU may hold at the end beyond what it held at the start.
MEMORY_LEFT = GIB // 4


def judge_tests(counts: TestCounts) -> list[str]:
    """Return what is off about a run of tests."""
    reasons = [f"{name} failed: {raised}" for name, raised in counts.failed.items()]
    if not counts.passed and not counts.failed:
        reasons.append(f"no test ran ({len(counts.skipped)} were skipped)")
    return reasons


def judge_steps(steps: Sequence[Record], num_steps: int, mismatch: Mapping[str, float]) -> list[str]:
    """Return what is off about the training steps of any run."""
    reasons = []
    if len(steps) < num_steps:
        reasons.append(f"{len(steps)} of {num_steps} steps were made")
    for name in ("train/loss", "train/grad_norm"):
        bad = [step["step"] for step in steps if not _is_finite(step.get(name))]
        if bad:
            reasons.append(f"{name} is no finite number in steps {bad}")
    if steps and all(step.get("train/grad_norm") == 0 for step in steps):
        reasons.append("train/grad_norm is 0 in every step: nothing was learned")
    error = mismatch["token_mult_prob_error"]
    if steps and not error <= MAX_MISMATCH:
        reasons.append(
            f"engine and trainer disagree: the largest train/token_mult_prob_error is {error:.4f}, "
            f"and the limit {MAX_MISMATCH}"
        )
    return reasons


def judge_accuracy(accuracies: Sequence[float]) -> list[str]:
    """Return what is off about the held-out accuracy of the demo, which is its last validation's."""
    if not accuracies:
        return ["the demo was never validated"]
    if accuracies[-1] >= MIN_ACCURACY:
        return []
    return [
        f"held-out accuracy went from {accuracies[0]:.3f} to {accuracies[-1]:.3f}, and should reach "
        f"{MIN_ACCURACY}"
    ]


def judge_memory(peaks: Sequence[Peak]) -> list[str]:
    """Return where a run held more than the timetable plans, beyond the allowance."""
    return [
        f"GPU {peak.gpu} held {peak.measured / GIB:.1f} GiB in {peak.stage}, where the timetable has "
        f"{peak.planned / GIB:.1f} (allowed are {MEMORY_SHARE:.0%} and {MEMORY_SLACK / GIB:g} GiB more)"
        for peak in peaks
        if peak.measured > peak.planned * (1 + MEMORY_SHARE) + MEMORY_SLACK
    ]


def judge_end(before: Sequence[int], after: Sequence[int]) -> list[str]:
    """Return which GPUs hold more bytes after everything than they did before."""
    return [
        f"GPU {gpu} holds {(now - earlier) / GIB:.2f} GiB more at the end than at the start"
        for gpu, (earlier, now) in enumerate(zip(before, after, strict=True))
        if now - earlier > MEMORY_LEFT
    ]


def _is_finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
