"""The named axes pp, dp, cp, tp and ep, a worker's coordinates on them, and who leads its replica."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

# Where the ranks of a world find each other: at a file that nobody else sees, or at the address and port at
# which the first of them listens.
MeetingPlace: TypeAlias = Path | tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the named axes. The world has tp x cp x dp x pp ranks, in Megatron's order, tp fastest.

    Expert parallelism divides the tp x cp x dp ranks of a pipeline stage in a second way: each ``etp`` x
    ``ep`` consecutive ranks hold all experts of a layer between them, and ``etp`` of these share each expert.
    Raises ValueError when etp x ep does not divide tp x cp x dp.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int = 1
    etp: int = 1

    def __post_init__(self) -> None:
        if self.stage_size % self.expert_ranks:
            raise ValueError(
                f"ep={self.ep} x etp={self.etp} must divide the tp x cp x dp = {self.stage_size} ranks of a "
                "stage"
            )

    @property
    def expert_ranks(self) -> int:
        """Number of consecutive ranks of a stage that hold all experts of a layer between them."""
        return self.etp * self.ep

    @property
    def stage_size(self) -> int:
        """Number of ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """Return the coordinates of a global rank. Raises ValueError for one outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside the world of {self.world_size} workers")
        return Coordinates(
            layout=self,
            rank=rank,
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // self.stage_size,
            ep=rank % self.stage_size // self.etp % self.ep,
            etp=rank % self.etp,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """One worker's position on every axis. No field has a default, so that none is forgotten."""

    layout: ParallelLayout
    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int

    @property
    def is_leader(self) -> bool:
        """Whether this worker leads its replica: it is first on every axis over which samples are replicated.

        It alone fetches the replica's samples and writes results back. The driver's dispatch and the worker's
        write-back both ask this property.
        """
        return self.tp == 0 and self.cp == 0 and self.pp == 0
