"""Samples the memory of the GPUs, in all and by process, in a thread of the checking process."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from nemo_like.observability.gpu_usage import visible_gpus
from scripts.gpu_check_parts.settings import Gpu

_INTERVAL_S = 0.03


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """What one GPU held at one moment."""

    used_bytes: int
    by_process: dict[int, int]  # by process id; empty where the driver does not tell


@dataclass(frozen=True, slots=True)
class MemorySample:
    """What all GPUs held at one moment."""

    time_ns: int  # of the system's clock, as in traces
    gpus: tuple[GpuMemory, ...]


ReadMemory = Callable[[], tuple[GpuMemory, ...]]


@dataclass(slots=True)
class MemorySampler:
    """Samples within ``with``; without GPUs, nothing."""

    read: ReadMemory | None
    samples: list[MemorySample] = field(default_factory=list)
    _end: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def __enter__(self) -> MemorySampler:
        if self.read is not None:
            self._thread = threading.Thread(target=self._sample, name="GPU memory", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        if self._thread is not None:
            self._thread.join(10.0)

    def _sample(self) -> None:
        assert self.read is not None
        while not self._end.wait(_INTERVAL_S):
            self.samples.append(MemorySample(time.time_ns(), self.read()))


def open_nvml() -> tuple[tuple[Gpu, ...], ReadMemory | None]:
    """Return the GPUs that CUDA shows to this process, and a function that reads their memory.

    There are none without NVIDIA's driver or the package nvidia-ml-py.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = _handles(pynvml)
    except ModuleNotFoundError:
        return (), None
    except pynvml.NVMLError:
        return (), None

    def read() -> tuple[GpuMemory, ...]:
        return tuple(_memory(pynvml, handle) for handle in handles)

    return tuple(_gpu(pynvml, handle) for handle in handles), read if handles else None


def _handles(pynvml: Any) -> list[Any]:
    names = visible_gpus(os.environ.get("CUDA_VISIBLE_DEVICES"), pynvml.nvmlDeviceGetCount())
    return [
        pynvml.nvmlDeviceGetHandleByIndex(name)
        if isinstance(name, int)
        else pynvml.nvmlDeviceGetHandleByUUID(name)
        for name in names
    ]


def _gpu(pynvml: Any, handle: Any) -> Gpu:
    name, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
    text = name.decode() if isinstance(name, bytes) else str(name)
    return Gpu(name=text, total_bytes=int(memory.total), free_bytes=int(memory.free))


def _memory(pynvml: Any, handle: Any) -> GpuMemory:
    used = int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    try:
        processes = pynvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except pynvml.NVMLError:
        return GpuMemory(used, {})
    return GpuMemory(used, {int(one.pid): int(one.usedGpuMemory or 0) for one in processes})
