"""Samples the utilisation and memory of a process's GPUs, on a thread beside its work."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from nemo_like.observability.metrics import Metric, maximum, mean

_INTERVAL_S = 0.5
_GIB = 2**30


@dataclass(frozen=True, slots=True)
class GpuSample:
    """The state of one GPU at one moment. It covers all processes that use the GPU."""

    utilization: float  # share of the driver's latest sampling period in which a kernel ran
    used_bytes: int
    total_bytes: int


ReadGpu = Callable[[], GpuSample]


def usage_metrics(samples: Sequence[GpuSample]) -> dict[str, Metric]:
    """Return mean utilisation and peak memory, to be merged over processes; empty without samples."""
    if not samples:
        return {}
    return {
        "utilization": mean(sum(sample.utilization for sample in samples), len(samples)),
        "memory_peak_gib": maximum(max(sample.used_bytes for sample in samples) / _GIB),
        "memory_peak_share": maximum(max(sample.used_bytes / sample.total_bytes for sample in samples)),
    }


class GpuUsage:
    """Samples GPUs every ``interval_s`` seconds, on a thread that ends with the process."""

    def __init__(self, gpus: Sequence[ReadGpu], interval_s: float = _INTERVAL_S) -> None:
        """Start the thread, unless there are no GPUs."""
        self._gpus, self._interval_s = list(gpus), interval_s
        self._lock = threading.Lock()
        self._samples: list[GpuSample] = []
        if self._gpus:
            threading.Thread(target=self._sample, name="GPU usage", daemon=True).start()

    def take(self) -> dict[str, Metric]:
        """Sample once more, and return the metrics of all samples since the last ``take``."""
        now = [read() for read in self._gpus]
        with self._lock:
            samples, self._samples = [*self._samples, *now], []
        return usage_metrics(samples)

    def _sample(self) -> None:
        pause = threading.Event()
        while not pause.wait(self._interval_s):
            now = [read() for read in self._gpus]
            with self._lock:
                self._samples += now


def own_gpus(environment: Mapping[str, str] = os.environ) -> list[ReadGpu]:
    """Return a reader for each NVIDIA GPU that this process may use.

    Returns an empty list without NVIDIA's driver or the package nvidia-ml-py, and when a GPU cannot be read.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return []
    try:
        pynvml.nvmlInit()
        readers = _readers(pynvml, environment)
        for read in readers:
            read()
    except pynvml.NVMLError:
        return []  # no driver, or a GPU that it cannot read, such as a part of a GPU
    return readers


def gpu_memory_bytes(environment: Mapping[str, str] = os.environ) -> list[int]:
    """Return the memory of each NVIDIA GPU that this process may use; empty when ``own_gpus`` finds none."""
    return [read().total_bytes for read in own_gpus(environment)]


def _readers(pynvml: Any, environment: Mapping[str, str]) -> list[ReadGpu]:
    names = visible_gpus(environment.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
    by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID

    def read(handle: Any) -> GpuSample:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        busy = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100.0
        return GpuSample(busy, int(memory.used), int(memory.total))

    return [partial(read, by_index(name) if isinstance(name, int) else by_uuid(name)) for name in names]


def visible_gpus(cuda_visible_devices: str | None, num_gpus: int) -> list[int | str]:
    """Return the indices or UUIDs of the GPUs that CUDA shows to a process.

    As in CUDA, names in ``cuda_visible_devices`` after the first invalid one are ignored; None shows all
    GPUs.
    """
    if cuda_visible_devices is None:
        return list(range(num_gpus))
    visible: list[int | str] = []
    for name in (part.strip() for part in cuda_visible_devices.split(",")):
        if name.startswith(("GPU-", "MIG-")):
            visible.append(name)
        elif name.isdigit() and int(name) < num_gpus:
            visible.append(int(name))
        else:
            break
    return visible
