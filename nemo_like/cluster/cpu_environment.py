"""Environment variables of processes that compute on the CPU. Standard library only."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CPU_ENVIRONMENT: Mapping[str, str] = MappingProxyType(
    {
        # Several processes share the cores; OpenMP threads that outnumber the free cores stall at barriers.
        "OMP_NUM_THREADS": "1",
        # Compiling takes longer than it saves: an engine's first request with log-probs would wait seconds.
        "TORCHDYNAMO_DISABLE": "1",
        # Make glibc keep freed memory. Returning activations to the system after every layer, and faulting
        # them in again, takes a twentieth of the time.
        "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
        "MALLOC_TRIM_THRESHOLD_": str(2**40),
        "MALLOC_TOP_PAD_": str(64 * 2**20),
        # Make glibc ask for huge pages, where the system gives them on request.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }
)
