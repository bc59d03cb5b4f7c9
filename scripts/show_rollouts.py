"""Print the conversations of a training step: the best and the worst answer of each group, and the first
whose reward failed.

    python scripts/show_rollouts.py RUN_DIR                          # the latest step that was dumped
    python scripts/show_rollouts.py RUN_DIR --step 12
    python scripts/show_rollouts.py RUN_DIR --step 12 --group 3      # all answers of one group
    python scripts/show_rollouts.py RUN_DIR --outcome reward_failed  # all answers with this outcome

Reads rollouts/step_N.jsonl, which has an excerpt of every tenth step, or whole steps with
rollout.dump_period=1 (or more).
"""

from __future__ import annotations

import argparse
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.algorithms.rewards import Outcome
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.rollout.options import EXCERPT_OF
from nemo_like_tools.report.sample_files import ReportProblem, sample_lines

Sample = dict[str, Any]

# What is shown of a sample; rewards are null where they failed.
_NONE = object()
_NUMBER = int | float | None
_SHOWN: Mapping[str, Any] = {
    **dict.fromkeys(("reward", "scaled_reward", "shaped_reward"), _NUMBER),
    "is_truncated": int,
    "outcome": str,
    "answer": object,
    "failure": str | None,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the conversations. Returns the exit code: 0, or 2 when there is nothing to show."""
    accept_all_characters()
    options = _parse(arguments)
    try:
        groups = read_groups(options.run_dir, options.step)
    except (OSError, ReportProblem) as error:
        print(printable(str(error)), file=sys.stderr)
        return 2
    for line in excerpt_notes(groups):
        print(line)
    chosen_of: Callable[[Sequence[Sample]], list[Sample]]
    if options.outcome is not None:
        chosen_of = partial(with_outcome, outcome=options.outcome)
    else:
        chosen_of = most_telling if options.group is None else list
    chosen = {number: found for number, samples in groups.items() if (found := chosen_of(samples))}
    if options.outcome is not None and not chosen:
        print(f"no answer has the outcome {options.outcome}", file=sys.stderr)
        return 2
    if options.group is not None and options.group not in chosen:
        print(f"no group {options.group}; there are {', '.join(map(str, chosen))}", file=sys.stderr)
        return 2
    shown = list(chosen)[: options.limit] if options.group is None else [options.group]
    for number in shown:
        print(printable("\n".join(format_group(number, groups[number], chosen[number]))))
    if len(shown) < len(chosen) and options.group is None:
        print(f"... {len(chosen) - len(shown)} more groups; --limit shows more of them")
    return 0


def read_groups(run_dir: Path, step: int | None = None) -> dict[int, list[Sample]]:
    """Read the samples of a step, or of the latest that there is, by group number. Raises FileNotFoundError,
    which names the steps that there are, when this step has no file, and ReportProblem for a line that is no
    sample."""
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir} is not a directory; name that of a run")
    folder = run_dir / "rollouts"
    steps = sorted(int(found[1]) for found in map(_step_of, folder.glob("step_*.jsonl")) if found)
    if not steps:
        rule = "has no samples of training steps"
        raise FileNotFoundError(f"{run_dir} {rule}; rollout.dump_period=1 keeps those of every step")
    path = folder / f"step_{steps[-1] if step is None else step}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; there are steps {', '.join(map(str, steps))}")
    groups: dict[int, list[Sample]] = {}
    for number, sample, _ in sample_lines(path):
        if wrong := [
            name for name, kinds in _SHOWN.items() if not isinstance(sample.get(name, _NONE), kinds)
        ]:
            raise ReportProblem(
                f"{path}:{number}: the sample's {', '.join(wrong)} are not what a run writes; remove the "
                "line, or the file"
            )
        groups.setdefault(sample["group"], []).append(sample)
    return groups


def excerpt_notes(groups: Mapping[int, Sequence[Sample]]) -> Iterator[str]:
    """Yield a line that says so when the samples are an excerpt of their step."""
    samples = [sample for group in groups.values() for sample in group]
    if samples and EXCERPT_OF in samples[0]:
        yield (
            f"an excerpt: {len(samples)} of the step's {samples[0][EXCERPT_OF]:,} samples; "
            "rollout.dump_period=1 keeps all of every step\n"
        )


def with_outcome(samples: Sequence[Sample], outcome: str) -> list[Sample]:
    """Return the samples that have this outcome."""
    return [sample for sample in samples if sample["outcome"] == outcome]


def most_telling(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with the highest and the lowest shaped reward, or one sample when all are equal;
    then the first whose reward failed."""
    judged = [sample for sample in samples if sample["failure"] is None]
    failed = [sample for sample in samples if sample["failure"] is not None]
    ranked = sorted(judged, key=lambda sample: sample["shaped_reward"], reverse=True)
    is_uniform = not ranked or ranked[0]["shaped_reward"] == ranked[-1]["shaped_reward"]
    return [*(ranked[:1] if is_uniform else [ranked[0], ranked[-1]]), *failed[:1]]


def format_group(number: int, samples: Sequence[Sample], chosen: Sequence[Sample]) -> Iterator[str]:
    """Yield the lines of a group: its rewards, its prompt and answer, then the chosen conversations."""
    judged = [sample["reward"] for sample in samples if sample["failure"] is None]
    rewards = [f"{reward:g}" for reward in sorted(judged, reverse=True)]
    num_failed = len(samples) - len(judged)
    failed = f", {num_failed} failed" if num_failed else ""
    yield f"== group {number} ({samples[0]['env']}): {len(samples)} answers, rewards " + (
        " ".join(rewards or ["none"]) + failed
    )
    yield samples[0]["prompt"]
    for image in samples[0].get("images", ()):
        yield f"-- image: {image}"
    yield f"-- expected: {samples[0]['answer']}"
    for sample in chosen:
        yield f"-- answer {sample['generation']}: {_verdict(sample)}"
        for turn in sample["turns"]:
            yield turn["content"] if turn["role"] == "assistant" else f"[{turn['role']}] {turn['content']}"
    yield ""


def _verdict(sample: Sample) -> str:
    if sample["failure"] is not None:
        return f"reward failed: {sample['failure']}"
    parts = [f"reward {sample['reward']:g}"]
    parts += [
        f"{label} {sample[tag]:g}"
        for tag, label in (("scaled_reward", "scaled"), ("shaped_reward", "shaped"))
        if sample[tag] != sample["reward"]
    ]
    if "advantage" in sample:
        parts.append(f"advantage {sample['advantage']:+.3f}")
    if len(sample["rewards"]) > 1:
        parts += [
            f"{name} {'abstained' if value is None else f'{value:g}'}"
            for name, value in sample["rewards"].items()
        ]
    if sample["is_truncated"]:
        parts.append("truncated")
    return ", ".join([*parts, sample["outcome"]])


def _step_of(path: Path) -> re.Match[str] | None:
    return re.fullmatch(r"step_(\d+)\.jsonl", path.name)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path, help="the directory of the run")
    parser.add_argument("--step", type=int, help="default: the latest")
    parser.add_argument("--group", type=int, help="show every answer of this group")
    parser.add_argument(
        "--outcome", choices=[one.value for one in Outcome], help="show every answer with this outcome"
    )
    parser.add_argument("--limit", type=int, default=8, help="groups to show (default 8)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends it without an error
    sys.exit(main())
