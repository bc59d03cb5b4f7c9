"""What a run could leave on the machine besides its run directory."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Traces:
    """Names and numbers of everything of its kind there is, whosoever it is."""

    shared_memory: frozenset[str]  # files in /dev/shm
    ports: frozenset[int]  # TCP, listening
    temporary: frozenset[str]  # files and folders where a run and its Ray make theirs

    @classmethod
    def now(cls) -> Traces:
        connections = psutil.net_connections(kind="tcp")
        return cls(
            shared_memory=frozenset(os.listdir("/dev/shm")),
            ports=frozenset(one.laddr.port for one in connections if one.status == psutil.CONN_LISTEN),
            temporary=frozenset(os.listdir(tempfile.gettempdir())),
        )

    def since(self, before: Traces) -> list[str]:
        """A sentence for each kind of which there is more than before."""
        more = {
            "in /dev/shm": self.shared_memory - before.shared_memory,
            "listening ports": {str(port) for port in self.ports - before.ports},
            "temporary files": self.temporary - before.temporary,
        }
        return [f"left {what}: {', '.join(sorted(names))}" for what, names in more.items() if names]


def unfinished(run_dir: Path) -> list[str]:
    """A sentence for each file or folder that was written aside and never renamed or removed."""
    names = [*run_dir.rglob("tmp_*"), *run_dir.rglob("*.tmp")]
    return [f"left in the run directory: {path.relative_to(run_dir)}" for path in names]
