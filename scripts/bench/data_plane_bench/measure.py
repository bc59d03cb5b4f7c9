"""Repetitions of a step over all planes in turn, and what is derived from them."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from scripts.bench.data_plane_bench.batch import GROUP_SIZE, Batch, Shape
from scripts.bench.data_plane_bench.cluster import Bench, cpu_seconds
from scripts.bench.data_plane_bench.flow import Flow, StepTimes, step
from scripts.bench.data_plane_bench.planes import tensor_dtypes
from scripts.bench.data_plane_bench.transport import send_seconds

# Name in the results -> (plane, flow).
CONTENDERS = {
    "ours": ("ours", Flow.usual),
    "ours_as_used": ("ours", Flow.as_used),
    "transfer_queue_plain": ("transfer_queue_plain", Flow.usual),
    "ray_object_store": ("ray_object_store", Flow.usual),
}
# Bytes per token that a step of ours moves: the first put, then fetches and writes of each stage.
_PUT_BYTES = 9
_MOVED_BYTES = {
    "ours": (_PUT_BYTES, 9, 4, 5, 4, 9, 4, 17),
    "ours_as_used": (_PUT_BYTES, 9, 8),
}
_EMPTY = Shape(GROUP_SIZE, 4)
# Over how much its growth is measured: every process's CPU time is known in ticks of 10 ms.
_MIN_CPU_S = 2.0


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one contender at one shape."""

    first_put_ms: float
    fetch_ms: float
    step_ms: float


def checked(bench: Bench, shape: Shape, num_workers: int) -> None:
    """Every fetched value compared once, which also warms everything up."""
    bench.cast.load(shape)
    for plane, flow in CONTENDERS.values():
        step(bench.cast, plane, flow, num_workers, "check")


def timings(bench: Bench, num_workers: int, repetitions: int) -> dict[str, Timing]:
    """Each contender once per repetition, in an order that turns; call ``checked`` before."""
    names = list(CONTENDERS)
    times: dict[str, list[StepTimes]] = {name: [] for name in names}
    memcpy: list[StepTimes] = []
    for repetition in range(repetitions):
        first = repetition % len(names)
        for name in (*names[first:], *names[:first]):
            plane, flow = CONTENDERS[name]
            times[name].append(step(bench.cast, plane, flow, num_workers))
        memcpy.append(_memcpy(bench))
    return {name: _medians(of_name) for name, of_name in {**times, "memcpy": memcpy}.items()}


def record(shape: Shape, plane: str, timing: Timing, dtype_choice: str) -> dict[str, Any]:
    """One entry of the results."""
    return {
        "shape": str(shape),
        "plane": plane,
        "first_put_ms": round(timing.first_put_ms, 2),
        "fetch_ms": round(timing.fetch_ms, 2),
        "step_ms": round(timing.step_ms, 2),
        "bytes": first_put_bytes(plane, shape, dtype_choice),
    }


def first_put_bytes(plane: str, shape: Shape, dtype_choice: str) -> int:
    """Bytes of the first put in the plane's own layout."""
    batch = Batch.make(shape)
    if plane not in ("transfer_queue_plain", "ray_object_store"):
        return batch.num_tokens * _PUT_BYTES
    is_wide = bool(tensor_dtypes(dtype_choice))
    per_token, per_row = (20, 12) if is_wide else (9, 8)
    tokens = batch.num_tokens if plane == "transfer_queue_plain" else shape.num_rows * shape.max_length
    return tokens * per_token + shape.num_rows * per_row


def ratios(timing: Mapping[str, Timing]) -> dict[str, float]:
    """How many times faster; each name says than what."""
    ours, as_used = timing["ours"], timing["ours_as_used"]
    plain, store = timing["transfer_queue_plain"], timing["ray_object_store"]
    return {
        "step_vs_transfer_queue_plain": round(plain.step_ms / ours.step_ms, 2),
        "step_as_used_vs_transfer_queue_plain": round(plain.step_ms / as_used.step_ms, 2),
        "first_put_vs_transfer_queue_plain": round(plain.first_put_ms / ours.first_put_ms, 2),
        "first_put_vs_ray_object_store": round(store.first_put_ms / ours.first_put_ms, 2),
    }


def spent(bench: Bench, shape: Shape, num_workers: int, repetitions: int) -> dict[str, dict[str, float]]:
    """What a step of ours is spent on, in ms: ``memcpy`` of its bytes; ``transport``, what sending them
    between two processes over TCP costs beyond that; ``round_trips``, a step with next to no bytes;
    ``bookkeeping``, the rest: per row and per chunk."""
    num_tokens = Batch.make(shape).num_tokens
    address = bench.sink.submit("address").result(30)
    bench.cast.load(_EMPTY)
    empty_workers = 1
    for plane, flow in (CONTENDERS["ours"], CONTENDERS["ours_as_used"]):
        step(bench.cast, plane, flow, empty_workers)
    empty = {
        name: [step(bench.cast, *CONTENDERS[name], empty_workers) for _ in range(repetitions)]
        for name in _MOVED_BYTES
    }
    bench.cast.load(shape)
    result = {}
    for name, per_token in _MOVED_BYTES.items():
        sizes = [num_tokens * one for one in per_token]
        steps = [step(bench.cast, *CONTENDERS[name], num_workers) for _ in range(repetitions)]
        memcpy_ms = 1e3 * statistics.median(_remote_memcpy(bench, sizes) for _ in range(repetitions))
        sent_ms = 1e3 * statistics.median(send_seconds(address, sizes) for _ in range(repetitions))
        step_ms, empty_ms = _medians(steps).step_ms, _medians(empty[name]).step_ms
        result[name] = {
            "step": round(step_ms, 2),
            "memcpy": round(memcpy_ms, 2),
            "transport": round(max(0.0, sent_ms - memcpy_ms), 2),
            "round_trips": round(empty_ms, 2),
            "bookkeeping": round(max(0.0, step_ms - max(sent_ms, memcpy_ms) - empty_ms), 2),
            "share_of_memcpy": round(memcpy_ms / step_ms, 3),
        }
    return result


def cpu_growth(bench: Bench, shapes: Sequence[Shape], num_workers: int, repetitions: int) -> dict[str, Any]:
    """CPU of a step over all processes, at equal bytes and growing numbers of rows."""
    cpu_ms: dict[str, dict[str, float]] = {name: {} for name in CONTENDERS}
    for shape in shapes:
        checked(bench, shape, num_workers)
        processes = bench.processes()
        for name, (plane, flow) in CONTENDERS.items():
            step(bench.cast, plane, flow, num_workers)
            before, used_s, num_steps = cpu_seconds(processes), 0.0, 0
            while used_s < _MIN_CPU_S:
                for _ in range(repetitions):
                    step(bench.cast, plane, flow, num_workers)
                used_s, num_steps = cpu_seconds(processes) - before, num_steps + repetitions
            cpu_ms[name][str(shape)] = round(1e3 * used_s / num_steps, 1)
    first, last = str(shapes[0]), str(shapes[-1])
    return {
        "cpu_ms": cpu_ms,
        "growth": {name: round(of_name[last] / of_name[first], 2) for name, of_name in cpu_ms.items()},
    }


def _memcpy(bench: Bench) -> StepTimes:
    """The bytes of our usual flow: its first put, its first fetch, all of its step."""
    num_tokens = Batch.make(_loaded_shape(bench)).num_tokens
    sizes = [num_tokens * one for one in _MOVED_BYTES["ours"]]
    put_s, fetch_s = _remote_memcpy(bench, sizes[:1]), _remote_memcpy(bench, sizes[1:2])
    return StepTimes(put_s, fetch_s, _remote_memcpy(bench, sizes))


def _loaded_shape(bench: Bench) -> Shape:
    return bench.cast.driver.shape


def _remote_memcpy(bench: Bench, sizes: Sequence[int]) -> float:
    return ray.get(bench.cast.producer.submit("memcpy", sizes).ref)


def _medians(times: Sequence[StepTimes]) -> Timing:
    return Timing(
        *(
            1e3 * statistics.median(getattr(one, name) for one in times)
            for name in ("first_put_s", "fetch_s", "step_s")
        )
    )
