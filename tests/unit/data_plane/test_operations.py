"""What is noted of operations, and the metrics made of it."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.batch.columns import GENERATION_LOGPROBS, POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.data_plane.in_memory import InMemoryDataPlane, LocalHost
from nemo_like.data_plane.observed import ObservedDataPlane, ObservedStore
from nemo_like.data_plane.operations import Operation, OperationLog, operation_metrics


def test_metrics_of_a_step_by_hand() -> None:
    fetches = [Operation("fetch", {"a": 1000, "b": 3000}, 0.001 * n) for n in (4, 1, 3, 2)]
    metrics = operation_metrics([*fetches, Operation("fetch", {"b": 0}, 0.010), Operation("open", {}, 0.5)])
    assert metrics["data_plane/fetch/count"] == 5
    assert metrics["data_plane/fetch/bytes"] == 16_000
    assert metrics["data_plane/fetch/gb_per_s"] == pytest.approx(16_000 / 0.020 / 1e9)
    assert metrics["data_plane/fetch/latency_p50_s"] == 0.003
    assert metrics["data_plane/fetch/latency_p95_s"] == metrics["data_plane/fetch/latency_max_s"] == 0.010
    assert metrics["data_plane/fetch/a/count"] == 4
    assert metrics["data_plane/fetch/a/bytes"] == 4000
    # Calls that carried column a moved 16 kB in 10 ms.
    assert metrics["data_plane/fetch/a/gb_per_s"] == pytest.approx(16_000 / 0.010 / 1e9)
    assert metrics["data_plane/fetch/a/latency_p50_s"] == 0.002
    assert metrics["data_plane/fetch/b/count"] == 5
    assert {name: value for name, value in metrics.items() if "/open/" in name} == {
        "data_plane/open/count": 1,
        "data_plane/open/latency_p50_s": 0.5,
        "data_plane/open/latency_p95_s": 0.5,
        "data_plane/open/latency_max_s": 0.5,
    }


def test_nothing_done_gives_no_metrics() -> None:
    assert operation_metrics([]) == {}


def test_an_operation_that_raises_leaves_no_record() -> None:
    log = OperationLog()
    with pytest.raises(KeyError), log.operation("put", ["a"]):
        log.moved("a", 5)
        raise KeyError("a")
    log.moved("a", 5)
    assert log.take() == ()


def observed(host: LocalHost) -> ObservedDataPlane:
    plane, log = InMemoryDataPlane(host), OperationLog()
    plane._store = ObservedStore(plane._store, log)
    return ObservedDataPlane(plane, log)


def test_every_operation_is_noted_with_the_bytes_that_it_moved() -> None:
    host = LocalHost()
    InMemoryDataPlane(host).open_partition("p", (*ROLLOUT_COLUMNS, *POLICY_COLUMNS))
    rollout, worker = observed(host), observed(host)
    meta = rollout.put(
        "p",
        {"input_ids": np.zeros(10, np.int32), "generation_logprobs": np.zeros(10, np.float32)},
        lengths=(4, 6),
        chunk_sizes=(1, 1),
        tags={},
    )
    worker.fetch(meta, ["input_ids"])
    worker.write(meta, {"prev_logprobs": np.zeros(10, np.float32)})
    worker.fetch(meta, ["input_ids", "prev_logprobs", GENERATION_LOGPROBS.name])
    worker.clear(meta)
    noted = [(operation.name, operation.column_bytes) for operation in worker.take_operations()]
    assert noted == [
        ("fetch", {"input_ids": 40}),
        ("write", {"prev_logprobs": 40}),
        ("fetch", {"input_ids": 0, "prev_logprobs": 0, "generation_logprobs": 40}),
        ("clear", {}),
    ]
    assert worker.take_operations() == ()
    (put,) = rollout.take_operations()
    assert put.column_bytes == {"input_ids": 40, "generation_logprobs": 40}
    assert put.seconds > 0


def test_a_plane_that_nobody_observes_notes_nothing() -> None:
    assert InMemoryDataPlane().take_operations() == ()
