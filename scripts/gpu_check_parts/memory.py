"""The peaks of GPU memory in each stage of a run, from samples and spans, beside the timetable."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.cluster.stage import Stage
from nemo_like.plan.memory_timetable import MemoryTimetable
from scripts.gpu_check_parts.run_files import Span
from scripts.gpu_check_parts.sampling import MemorySample
from scripts.gpu_check_parts.settings import GIB

# What a stage may hold on its way to the next: a sync ends with the engines awake, and a generation ends with
# them asleep.
_WITH_TRANSITIONS = {Stage.weight_sync: (Stage.weight_sync, Stage.generation)}
_UNTRACED = (Stage.engine_start, Stage.policy_start)
OTHERS = "others"


@dataclass(slots=True, kw_only=True)
class Peak:
    """The most memory of one GPU in one stage, beside what was planned. All are bytes."""

    gpu: int
    stage: str
    measured: int  # of all processes of the run
    planned: int
    by_process: dict[str, int] = field(default_factory=dict)  # the peak of each, at its own moment
    planned_by_process: dict[str, int] = field(default_factory=dict)


def peaks(
    samples: Sequence[MemorySample],
    stages: Sequence[Span],
    processes: Mapping[int, str],
    before: Sequence[int],
    timetable: MemoryTimetable,
) -> list[Peak]:
    """Return the peaks on every GPU of the timetable: of each stage, and of the whole run.

    ``before`` has the bytes that each GPU held before the run, and which do not count. The GPUs of the run
    are taken to be the first ones of node 0, in order.
    """
    found = []
    for (node, gpu), by_stage in timetable.by_gpu.items():
        if node != 0 or gpu >= len(before):
            continue
        for stage in by_stage:
            if stage in _UNTRACED:
                continue
            spans = [span for span in stages if span.name == stage.name]
            within = _within(samples, spans)
            if within:
                found.append(_peak(gpu, (stage,), within, processes, before[gpu], timetable))
        if samples:
            found.append(_peak(gpu, tuple(by_stage), samples, processes, before[gpu], timetable))
    return found


def _within(samples: Sequence[MemorySample], spans: Sequence[Span]) -> list[MemorySample]:
    times = [sample.time_ns for sample in samples]
    return [
        sample
        for span in spans
        for sample in samples[
            bisect.bisect_left(times, span.start_ns) : bisect.bisect_right(times, span.end_ns)
        ]
    ]


def _peak(
    gpu: int,
    stages: tuple[Stage, ...],
    samples: Sequence[MemorySample],
    processes: Mapping[int, str],
    before: int,
    timetable: MemoryTimetable,
) -> Peak:
    by_process: dict[str, int] = {}
    for sample in samples:
        now: dict[str, int] = {}
        for pid, size in sample.gpus[gpu].by_process.items():
            name = processes.get(pid, OTHERS)
            now[name] = now.get(name, 0) + size
        by_process |= {name: max(size, by_process.get(name, 0)) for name, size in now.items()}
    counted = {allowed for stage in stages for allowed in _WITH_TRANSITIONS.get(stage, (stage,))}
    planned_by_process: dict[str, int] = {}
    for stage in counted:
        held: dict[str, int] = {}
        for one in timetable.by_gpu[(0, gpu)][stage]:
            held[one.actor] = held.get(one.actor, 0) + one.num_bytes
        for actor, size in held.items():
            planned_by_process[actor] = max(size, planned_by_process.get(actor, 0))
    return Peak(
        gpu=gpu,
        stage=stages[0].name if len(stages) == 1 else "the whole run",
        measured=max(sample.gpus[gpu].used_bytes for sample in samples) - before,
        planned=max(timetable.bytes_in((0, gpu), stage) for stage in counted),
        by_process=by_process,
        planned_by_process=planned_by_process,
    )


def peak_table(found: Sequence[Peak]) -> list[str]:
    """Return lines that show measured beside planned GiB."""
    if not found:
        return []
    lines = [f"{'GPU memory in GiB':<28}{'measured':>10}{'planned':>10}   by process (measured / planned)"]
    for peak in found:
        names = dict.fromkeys((*peak.planned_by_process, *peak.by_process))
        parts = ", ".join(
            f"{name} {_gib(peak.by_process.get(name))} / {_gib(peak.planned_by_process.get(name))}"
            for name in names
        )
        where = f"  GPU {peak.gpu} {peak.stage}"
        lines.append(f"{where:<28}{_gib(peak.measured):>10}{_gib(peak.planned):>10}   {parts}")
    return lines


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f}"
