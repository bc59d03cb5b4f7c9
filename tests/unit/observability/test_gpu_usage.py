from __future__ import annotations

import threading

import pytest

from nemo_like.observability.gpu_usage import GpuSample, GpuUsage, own_gpus, usage_metrics, visible_gpus
from nemo_like.observability.metrics import merge

GIB = 2**30


def test_utilisation_is_a_mean_over_gpus_and_moments_and_memory_the_fullest_of_them():
    first = usage_metrics([GpuSample(0.5, 10 * GIB, 80 * GIB), GpuSample(0.9, 40 * GIB, 80 * GIB)])
    second = usage_metrics([GpuSample(0.1, 20 * GIB, 80 * GIB)])
    merged = {name: metric.value for name, metric in merge([first, {}, second]).items()}
    assert merged == pytest.approx({"utilization": 0.5, "memory_peak_gib": 40.0, "memory_peak_share": 0.5})


def test_every_look_counts_in_one_step_alone():
    looked = threading.Semaphore(0)

    def read():
        looked.release()
        return GpuSample(1.0, GIB, 2 * GIB)

    usage = GpuUsage([read], interval_s=0.001)
    for _ in range(3):
        assert looked.acquire(timeout=30)
    assert usage.take()["utilization"].weight >= 3
    assert GpuUsage([read], interval_s=1000.0).take()["utilization"].weight == 1


def test_a_process_without_gpus_has_no_metrics_of_them():
    assert GpuUsage(own_gpus({"CUDA_VISIBLE_DEVICES": ""})).take() == {}


@pytest.mark.parametrize(
    ("variable", "visible"),
    [
        (None, [0, 1, 2, 3]),
        ("", []),
        ("2, 0", [2, 0]),
        ("1,7,2", [1]),
        ("-1", []),
        ("GPU-8932f937,1", ["GPU-8932f937", 1]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(variable, visible):
    assert visible_gpus(variable, 4) == visible
