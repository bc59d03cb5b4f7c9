"""Records what a process does: its spans, torch's profile, NVTX ranges and the usage of its GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nemo_like.observability.gpu_usage import GpuUsage, own_gpus
from nemo_like.observability.metrics import Metric
from nemo_like.observability.trace import Span, add_annotation, remove_annotation, start_trace, take_trace


class ProcessObserver:
    """Starts and stops recording in its process. The profiler and the NVTX ranges import torch."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._gpu_usage: GpuUsage | None = None

    def start_trace(self) -> None:
        """Record every ``span`` from now on."""
        start_trace()

    def take_trace(self) -> list[Span]:
        """Return the spans since ``start_trace``, and stop recording."""
        return take_trace()

    def start_profile(self) -> None:
        """Start torch's profiler for all threads: operators, and CUDA kernels where there is a GPU."""
        from torch import profiler
        from torch._C._profiler import _ExperimentalConfig

        # An engine computes on a thread of its own.
        config = _ExperimentalConfig(profile_all_threads=True)
        if self._profile is not None:  # it was started for a step that was abandoned
            self._profile.stop()
        self._profile = profiler.profile(
            activities=profiler.supported_activities(), experimental_config=config
        )
        self._profile.start()
        add_annotation("profile", profiler.record_function)

    def stop_profile(self, path: str) -> None:
        """Stop the profiler, and write its record to ``path`` as a Chrome trace, spans included."""
        remove_annotation("profile")
        self._profile.stop()
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        self._profile.export_chrome_trace(path)
        self._profile = None

    def take_gpu_usage(self) -> dict[str, Metric]:
        """Return this process's GPU utilisation and memory since the last call; the first starts sampling."""
        if self._gpu_usage is None:
            self._gpu_usage = GpuUsage(own_gpus())
        return self._gpu_usage.take()

    def mark_ranges(self) -> None:
        """Show every ``span`` to NVIDIA Nsight Systems as an NVTX range, for the rest of the run."""
        from torch.cuda import nvtx

        add_annotation("nvtx", nvtx.range)
