"""What one call of the check works with, and how its result is named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU as the driver reports it."""

    name: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a call of the check was asked for, and what it found."""

    device: str  # cuda or cpu
    output: Path
    gpus: tuple[Gpu, ...] = ()
    demo_steps: int | None = None  # None: those of the configuration
    mark: str = "0"  # names this call's runs, and marks its processes

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def runs(self) -> Path:
        return self.output / "runs"


@dataclass(slots=True, kw_only=True)
class Result:
    """What became of a part. ``reasons`` is empty where nothing is off."""

    seconds: float = 0.0
    reasons: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: Mapping[str, object] = field(default_factory=dict)
    table: list[str] = field(default_factory=list)
