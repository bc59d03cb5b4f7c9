"""Calibrates a simulation from a run's files: configuration, ``metrics.jsonl``, ``rollout_times.jsonl``.

The speed of an engine is fitted by least squares: a request whose longest response has n tokens, and beside
which b sequences run on average, takes request_s + n x token_s + n x b x token_per_sequence_s.
"""

from __future__ import annotations

import heapq
import statistics
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, combinations
from pathlib import Path
from typing import Any

from nemo_like.algorithms.options import StepShape, WeightUpdates
from nemo_like.config.resolved import read_resolved
from nemo_like.environments.options import ENVIRONMENT_KINDS
from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.printable import warn_on_stderr
from nemo_like.observability.rollout_times import RolloutTimes, SampleTimes, read_rollout_times
from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.what_if.workload import (
    EngineSpeed,
    GroupWork,
    Mode,
    SampleWork,
    StepWork,
    TrainerSpeed,
    TurnWork,
)

# Steps that a run may take to get warm; they are left out where later ones are enough.
_WARMING_STEPS, _ENOUGH_STEPS, _MOST_STEPS = 2, 3, 64
_SCORING, _TRAINING = ("logprobs", "teacher_logprobs", "values"), ("value_training", "policy_training")
# The optimizer's share of an update is not measured.
_OPTIMIZER_SHARE = 0.1


class UnfitRun(ValueError):
    """A run cannot calibrate a simulation. The message says why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRun:
    """A run's steps and speeds, read from its directory."""

    path: Path
    works: tuple[StepWork, ...]
    engine: EngineSpeed
    trainer: TrainerSpeed
    num_engines: int
    mode: Mode  # in which it ran
    measured_step_s: float  # mean of timing/train/total_step_time of the same steps


@dataclass(frozen=True, slots=True)
class _EngineRequest:
    """A request to an engine, with the times at which it was sent and answered."""

    asked_s: float
    came_s: float
    lengths: tuple[int, ...]  # of its responses, in tokens


def read_run(path: Path) -> RecordedRun:
    """Read a run directory and calibrate. Raises UnfitRun when something needed is missing."""
    directory = RunDirectory(path)
    for needed, remedy in (
        (directory.config_path, "name the directory of a run"),
        (directory.metrics_path, "name a run that made some steps"),
        (directory.rollout_times_path, "make a few steps with rollout.record_times=true"),
    ):
        if not needed.is_file():
            raise UnfitRun(f"--what-if={path}: there is no {needed.name}; {remedy}")
    try:
        config = read_resolved(directory.config_path, "grpo", "policy", "generation")
    except ValueError as error:
        raise UnfitRun(f"--what-if={path}: {error}; name a run whose configuration is whole") from None
    if str(config["grpo"].get("overlap") or "off") not in ("off", "False"):
        raise UnfitRun(
            f"--what-if={path}: with grpo.overlap={config['grpo']['overlap']} the run's stages overlap, so "
            "their times cannot be told apart; name a run with grpo.overlap=off"
        )
    if (limit := config.get("rollout", {}).get("max_tokens_per_step")) is not None:
        raise UnfitRun(
            f"--what-if={path}: with rollout.max_tokens_per_step={limit} samples waited for later steps, and "
            "these times are not kept apart from their decoding; name a run without it"
        )
    envs = config.get("env", {})
    agents = [name for name, env in envs.items() if ENVIRONMENT_KINDS.load(env["kind"]).calls_policy]
    if agents:
        raise UnfitRun(
            f"--what-if={path}: env.{agents[0]}.kind={envs[agents[0]]['kind']}, and the times of an agent's "
            "calls are not kept; name a run without agents"
        )
    metrics = {record["step"]: record for record in read_metrics(directory.metrics_path, warn_on_stderr)}
    try:
        times = read_rollout_times(directory.rollout_times_path, warn_on_stderr)
    except ValueError as error:
        raise UnfitRun(f"--what-if={path}: {error}") from None
    try:
        return calibrated(path, config, metrics, times)
    except (KeyError, TypeError, AttributeError) as error:
        raise UnfitRun(
            f"--what-if={path}: {directory.config_path} or {directory.metrics_path} is not what a run writes "
            f"({error!r}); name another run"
        ) from None


def calibrated(
    path: Path,
    config: Mapping[str, Any],
    metrics: Mapping[int, Mapping[str, Any]],
    times: Sequence[RolloutTimes],
) -> RecordedRun:
    """Return the calibrated run, from its resolved configuration, its metrics by step and its rollouts."""
    steps = _usable_steps(path, metrics, times)
    num_engines = config["generation"]["num_engines"]
    by_step: dict[int, list[RolloutTimes]] = {}
    for one in times:
        by_step.setdefault(one.step, []).append(one)
    works = tuple(step_work(metrics[step], by_step[step]) for step in steps)
    max_num_seqs = config["generation"]["vllm_cfg"]["max_num_seqs"]
    requests = [
        of_engine
        for engine in range(num_engines)
        for of_engine in [requests_of(engine, num_engines, [one for step in steps for one in by_step[step]])]
    ]
    policy, grpo = config["policy"], config["grpo"]
    num_samples = StepShape.read(grpo).num_samples
    return RecordedRun(
        path=path,
        works=works,
        engine=fitted_speed(requests, max_num_seqs),
        trainer=TrainerSpeed(
            num_replicas=policy["data_parallel_size"],
            updates_per_step=max(
                1, num_samples // policy["train_global_batch_size"] * grpo["num_epochs_per_rollout"]
            ),
            optimizer_share=_OPTIMIZER_SHARE,
            weight_sync_s=statistics.median(_weight_sync_s(metrics[step]) for step in steps),
            num_stage_calls=max(
                1, sum(_stage_s(metrics[steps[0]], name) > 0 for name in _SCORING + _TRAINING)
            ),
            validation_s=_median_of(metrics, "timing/validation/validation"),
        ),
        num_engines=num_engines,
        mode=Mode(
            max_staleness=grpo.get("max_staleness", 0),
            weight_updates=WeightUpdates(grpo.get("weight_updates", WeightUpdates.between_samples.value)),
        ),
        measured_step_s=statistics.fmean(metrics[step]["timing/train/total_step_time"] for step in steps),
    )


def step_work(metrics: Mapping[str, Any], rollouts: Sequence[RolloutTimes]) -> StepWork:
    """Return the work of a step, from its metrics and the times of its rollouts."""
    scoring_s = sum(_stage_s(metrics, name) for name in _SCORING)
    training_s = sum(_stage_s(metrics, name) for name in _TRAINING)
    both_s = scoring_s + training_s
    compute_s = min(both_s, metrics.get("performance/worker_compute_s", both_s))
    inside = compute_s / both_s if both_s else 0.0
    known_s = both_s + _stage_s(metrics, "generation") + _weight_sync_s(metrics)
    groups = [[_group(samples) for samples in rollout.groups] for rollout in rollouts]
    shown_s = sum(map(_seconds_of, rollouts)) + _stage_s(metrics, "rollout_put")
    num_samples = sum(len(group.samples) for of_rollout in groups for group in of_rollout)
    dropped = ("dynamic_sampling_num_uniform", "dynamic_sampling_num_surplus")
    return StepWork(
        rollouts=tuple(map(tuple, groups)),
        begin_s=max(0.0, _stage_s(metrics, "generation") - shown_s),
        put_s=_stage_s(metrics, "rollout_put"),
        scoring_s=scoring_s * inside,
        training_s=training_s * inside,
        calls_s=both_s - compute_s,
        driver_s=max(0.0, metrics["timing/train/total_step_time"] - known_s),
        wasted_share=sum(metrics.get(f"train/{name}", 0.0) for name in dropped) / num_samples,
    )


def requests_of(engine: int, num_engines: int, rollouts: Sequence[RolloutTimes]) -> list[_EngineRequest]:
    """Return the requests to one engine, in the order in which they were sent."""
    found = []
    for rollout in rollouts:
        for samples in rollout.groups[engine::num_engines]:
            if _is_one_request(samples):
                turns = [sample.turns[0] for sample in samples]
                of_group = [(turns[0].asked_s, turns[0].came_s, tuple(turn.num_tokens for turn in turns))]
            else:
                of_group = [
                    (turn.asked_s, turn.came_s, (turn.num_tokens,))
                    for sample in samples
                    for turn in sample.turns
                ]
            found += [
                _EngineRequest(rollout.began_s + asked_s, rollout.began_s + came_s, lengths)
                for asked_s, came_s, lengths in of_group
            ]
    return sorted(found, key=lambda one: one.asked_s)


def fitted_speed(requests_by_engine: Sequence[Sequence[_EngineRequest]], max_num_seqs: int) -> EngineSpeed:
    """Fit an engine's speed to the requests of all engines; all times are 0 without requests."""
    rows: list[tuple[float, ...]] = []
    seconds: list[float] = []
    for requests in requests_by_engine:
        for started_s, request, concurrency in _with_concurrency(requests, max_num_seqs):
            longest = max(request.lengths)
            rows.append((1.0, float(longest), longest * concurrency))
            seconds.append(request.came_s - started_s)
    request_s, token_s, token_per_sequence_s = least_squares(rows, seconds)
    return EngineSpeed(
        request_s=request_s,
        token_s=token_s,
        token_per_sequence_s=token_per_sequence_s,
        max_num_seqs=max_num_seqs,
    )


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, float, float]:
    """Return the three coefficients, none below 0, that bring ``rows`` closest to ``values``."""
    best, best_error = (0.0, 0.0, 0.0), sum(value * value for value in values)
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            found = _solved(
                [[sum(row[i] * row[j] for row in rows) for j in chosen] for i in chosen],
                [sum(row[i] * value for row, value in zip(rows, values, strict=True)) for i in chosen],
            )
            if found is None or min(found) < 0:
                continue
            by_index = dict(zip(chosen, found, strict=True))
            whole = (by_index.get(0, 0.0), by_index.get(1, 0.0), by_index.get(2, 0.0))
            error = sum(
                (value - sum(c * x for c, x in zip(whole, row, strict=True))) ** 2
                for row, value in zip(rows, values, strict=True)
            )
            if error < best_error * (1 - 1e-9):
                best, best_error = whole, error
    return best


def _solved(matrix: list[list[float]], vector: list[float]) -> list[float] | None:
    """Solve a small symmetric linear system by elimination; return None when it has no single solution."""
    rows = [[*row, value] for row, value in zip(matrix, vector, strict=True)]
    size = len(rows)
    for index in range(size):
        pivot = max(range(index, size), key=lambda at: abs(rows[at][index]))
        if abs(rows[pivot][index]) <= 1e-12 * max(1e-300, *(abs(matrix[at][at]) for at in range(size))):
            return None
        rows[index], rows[pivot] = rows[pivot], rows[index]
        for other in range(size):
            if other != index:
                factor = rows[other][index] / rows[index][index]
                rows[other] = [x - factor * y for x, y in zip(rows[other], rows[index], strict=True)]
    return [rows[index][size] / rows[index][index] for index in range(size)]


def _with_concurrency(
    requests: Sequence[_EngineRequest], max_num_seqs: int
) -> Iterator[tuple[float, _EngineRequest, float]]:
    """Yield the start of each request, the request, and the mean number of sequences that ran during it."""
    started = [*zip(_starts_s(requests, max_num_seqs), requests, strict=True)]
    changes: list[tuple[float, int]] = []
    for started_s, request in started:
        longest = max(request.lengths)
        changes += [(started_s, len(request.lengths))]
        changes += [
            (started_s + (request.came_s - started_s) * length / longest, -1) for length in request.lengths
        ]
    changes.sort()
    times = [time_s for time_s, _ in changes]
    running = [*accumulate(change for _, change in changes)]
    areas = [
        0.0,
        *accumulate(
            (after - before) * count for before, after, count in zip(times, times[1:], running, strict=False)
        ),
    ]

    def area(until_s: float) -> float:
        index = bisect_right(times, until_s) - 1
        return areas[index] + (until_s - times[index]) * running[index]

    for started_s, request in started:
        seconds = request.came_s - started_s
        if seconds > 0:
            yield started_s, request, (area(request.came_s) - area(started_s)) / seconds


def _starts_s(requests: Sequence[_EngineRequest], max_num_seqs: int) -> Iterator[float]:
    """Yield when each request began to run: requests wait in order until all their sequences have room."""
    ends: list[tuple[float, int]] = []
    num_running, earliest_s = 0, 0.0
    for request in requests:
        earliest_s = max(earliest_s, request.asked_s)
        while ends and (ends[0][0] <= earliest_s or num_running + len(request.lengths) > max_num_seqs):
            end_s, count = heapq.heappop(ends)
            num_running -= count
            earliest_s = max(earliest_s, end_s)
        num_running += len(request.lengths)
        heapq.heappush(ends, (request.came_s, len(request.lengths)))
        yield min(earliest_s, request.came_s)


def _usable_steps(
    path: Path, metrics: Mapping[int, Mapping[str, Any]], times: Sequence[RolloutTimes]
) -> list[int]:
    """Return the latest steps that have metrics and times, without the first steps if enough are left."""
    key = "timing/train/total_step_time"
    steps = sorted({one.step for one in times if key in metrics.get(one.step, {})})
    if not steps:
        raise UnfitRun(
            f"--what-if={path}: no step has both metrics and times; name a run that made some steps"
        )
    warm = steps[_WARMING_STEPS:] if len(steps) >= _WARMING_STEPS + _ENOUGH_STEPS else steps
    return warm[-_MOST_STEPS:]


def _group(samples: Sequence[SampleTimes]) -> GroupWork:
    return GroupWork(
        tuple(
            SampleWork(
                sample.num_tokens,
                tuple(TurnWork(turn.num_tokens, turn.judged_s - turn.came_s) for turn in sample.turns),
            )
            for sample in samples
        ),
        _is_one_request(samples),
    )


def _is_one_request(samples: Sequence[SampleTimes]) -> bool:
    """Return whether all samples came from one request: they were asked for, and came, at the same time."""
    first = {(turn.asked_s, turn.came_s) for sample in samples for turn in sample.turns}
    return len(first) == 1 and all(len(sample.turns) == 1 for sample in samples)


def _seconds_of(rollout: RolloutTimes) -> float:
    """Return the seconds from the beginning of a rollout to its last judged answer."""
    return max(turn.judged_s for samples in rollout.groups for one in samples for turn in one.turns)


def _weight_sync_s(metrics: Mapping[str, Any]) -> float:
    return float(metrics.get("weight_sync/weight_sync_s") or 0.0)


def _stage_s(metrics: Mapping[str, Any], name: str) -> float:
    return float(metrics.get(f"timing/train/{name}") or 0.0)


def _median_of(metrics: Mapping[int, Mapping[str, Any]], key: str) -> float:
    values = [record[key] for record in metrics.values() if record.get(key) is not None]
    return statistics.median(values) if values else 0.0
