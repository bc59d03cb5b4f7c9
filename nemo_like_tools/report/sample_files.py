"""Reads the files of a run that the report shows: metrics, and dumped samples step by step.

rollouts/step_N.jsonl, validation_N.jsonl ──▶ one ``Shard`` each: rows for tables, the samples compressed
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nemo_like.observability.jsonl import is_metrics
from nemo_like.rollout.options import EXCERPT_OF

_FILE = re.compile(r"(step|validation)_(\d+)\.jsonl")
_MODES = {"step": "training", "validation": "validation"}
_NEEDED = ("group", "generation", "env", "prompt", "turns", "rewards")
# The types of a sample's values; some values may be missing.
_ABSENT = type(None)
_KINDS: Mapping[str, Any] = {
    "group": int,
    "generation": int,
    "env": str,
    "prompt": str,
    "turns": list,
    "rewards": dict,
    "reward": float | int | _ABSENT,
    "num_response_tokens": int | _ABSENT,
    "outcome": str | _ABSENT,
    "failure": str | _ABSENT,
    EXCERPT_OF: int | _ABSENT,
}
_MAX_EXCERPT = 160  # characters of a prompt or of a failure's reason in tables
_MAX_RESPONSE = 120  # characters of a response in tables: its beginning and its end


class ReportProblem(ValueError):
    """A file does not have the form that a run writes. The message names the line and what to do."""


class SampleFile(NamedTuple):
    """A file of dumped samples."""

    mode: str  # training or validation
    step: int
    path: Path


@dataclass(frozen=True, slots=True)
class SampleRow:
    """The values of a sample that tables and filters of the page use."""

    group: int
    generation: int
    problem: tuple[str | None, int | None, str, str]  # source, index, environment, beginning of the prompt
    reward: float | None
    length: int | None  # tokens that the policy generated
    outcome: str | None
    failure: tuple[str, str] | None  # its kind, and the beginning of its reason
    response: str  # what follows the prompt, shortened
    rewards: tuple[tuple[str, float | None], ...]  # the components of its reward

    @classmethod
    def of(cls, sample: Mapping[str, Any]) -> SampleRow:
        reason = sample.get("failure")
        rewards = [value for value in sample["rewards"].values() if value is not None]
        return cls(
            group=sample["group"],
            generation=sample["generation"],
            problem=(sample.get("source"), sample.get("index"), sample["env"], _excerpt(sample["prompt"])),
            reward=None if reason is not None else sample.get("reward", sum(rewards)),
            length=sample.get("num_response_tokens"),
            outcome=sample.get("outcome"),
            failure=None if reason is None else (sample.get("failure_kind") or "failed", _excerpt(reason)),
            response=_both_ends(" ".join(turn["content"] for turn in sample["turns"])),
            rewards=tuple(sample["rewards"].items()),
        )


@dataclass(frozen=True, slots=True)
class Shard:
    """The samples of one file. ``packed`` is their JSON in the order of ``rows``, in gzip and base64."""

    mode: str
    step: int
    rows: tuple[SampleRow, ...]
    packed: str
    excerpt_of: int | None = None  # the samples that the step had, where the file has an excerpt of them


class JsonLine(NamedTuple):
    """One line of a file of JSON lines: its number from 1, its object, and its size in bytes."""

    number: int  # from 1
    value: dict[str, Any]
    size: int  # bytes


def sample_files(run_directory: Path) -> list[SampleFile]:
    """Return the files of dumped samples, sorted by mode and step."""
    found = [(_FILE.fullmatch(path.name), path) for path in (run_directory / "rollouts").glob("*.jsonl")]
    return sorted(SampleFile(_MODES[match[1]], int(match[2]), path) for match, path in found if match)


def read_shard(file: SampleFile, *, max_samples: int, max_size: int) -> Shard:
    """Read a file of dumped samples, beyond ``max_samples`` or ``max_size`` bytes only its first whole
    groups.

    Raises ReportProblem when a line is no sample.
    """
    kept = _first_groups(file.path, max_samples, max_size)
    rows = tuple(row for row, _ in kept)
    samples = [line.value for _, line in kept]
    total = samples[0].get(EXCERPT_OF) if samples else None
    return Shard(mode=file.mode, step=file.step, rows=rows, packed=packed(samples), excerpt_of=total)


def _first_groups(path: Path, max_samples: int, max_size: int) -> list[tuple[SampleRow, JsonLine]]:
    """Return the samples of the first groups that stay within the limits, and at least of the first group."""
    kept: list[tuple[SampleRow, JsonLine]] = []
    group_start = size = 0
    for line in sample_lines(path):
        row = SampleRow.of(line.value)
        size += line.size
        if kept and row.group != kept[-1][0].group:
            group_start = len(kept)
        if group_start and (len(kept) >= max_samples or size > max_size):
            return kept[:group_start]
        kept.append((row, line))
    return kept


def sample_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the lines of a file of dumped samples. Raises ReportProblem for a line that is no sample."""
    for line in json_lines(path):
        missing = [name for name in _NEEDED if name not in line.value]
        if missing:
            raise ReportProblem(
                f"{path}:{line.number}: the sample has no {', '.join(missing)}; remove the line, or the file"
            )
        wrong = [name for name, kinds in _KINDS.items() if not isinstance(line.value.get(name), kinds)]
        if wrong or not _are_turns(line.value["turns"]) or not _are_rewards(line.value["rewards"]):
            what = ", ".join(wrong) or "turns or rewards"
            raise ReportProblem(
                f"{path}:{line.number}: the sample's {what} are not what a run writes; remove the line, or "
                "the file"
            )
        yield line


def _are_turns(turns: Sequence[Any]) -> bool:
    return all(
        isinstance(turn, dict) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)
        for turn in turns
    )


def _are_rewards(rewards: Mapping[str, Any]) -> bool:
    return all(value is None or isinstance(value, int | float) for value in rewards.values())


def read_curves(path: Path) -> dict[str, Any]:
    """Return ``steps`` and, by metric, a value or None for each step. Raises ReportProblem."""
    records: dict[int, dict[str, Any]] = {}
    for number, record, _ in json_lines(path) if path.is_file() else ():
        if not isinstance(record.get("step"), int):
            raise ReportProblem(f"{path}:{number}: the line has no step; remove it")
        if not is_metrics(record):
            raise ReportProblem(f"{path}:{number}: the line has other values than numbers; remove it")
        records.setdefault(record["step"], {}).update(record)
    steps = sorted(records)
    names = sorted({name for record in records.values() for name in record} - {"step"})
    values = {name: [_short(records[step].get(name)) for step in steps] for name in names}
    return {"steps": steps, "values": values}


def json_lines(path: Path) -> Iterator[JsonLine]:
    """Yield the objects of a file of JSON lines.

    An unfinished last line is skipped, since it is being written. Raises ReportProblem for any other line
    that is no JSON object.
    """
    # The end of a line is a line feed: a text may hold other ends.
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                value = json.loads(line)
                if not isinstance(value, dict):
                    raise ValueError("it is a list or a plain value")
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                raise ReportProblem(
                    f"{path}:{number}: no JSON object ({error}); remove the line, or the file"
                ) from None
            yield JsonLine(number, value, len(line))


def packed(value: Any) -> str:
    """Return a value as compressed JSON, in base64, which an HTML page may hold."""
    return packed_text(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def packed_text(text: str) -> str:
    """Return a text compressed, in base64."""
    compressed = gzip.compress(text.encode("utf-8", "replace"), compresslevel=6, mtime=0)
    return base64.b64encode(compressed).decode("ascii")


def _excerpt(text: str) -> str:
    return text if len(text) <= _MAX_EXCERPT else f"{text[: _MAX_EXCERPT - 1]}…"


def _both_ends(text: str) -> str:
    """Return a text on one line, of a long one its beginning and its end."""
    line, half = " ".join(text.split()), _MAX_RESPONSE // 2
    return line if len(line) <= _MAX_RESPONSE else f"{line[:half]} … {line[-half:]}"


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
