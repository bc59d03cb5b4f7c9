"""Where a worker stands on the named axes (pp, dp, cp, tp) and (ep), and who leads its replica."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelLayout:
    """Sizes of the named axes, tp x cp x dp x pp being the world. Ranks in Megatron's order, tp fastest.

    Expert parallelism takes the ranks of a pipeline stage, tp x cp x dp of them, anew: each ``ep``
    consecutive ones hold all experts of a layer between them. Raises ValueError when ep does not divide
    them.
    """

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int = 1

    def __post_init__(self) -> None:
        if self.stage_size % self.ep:
            raise ValueError(
                f"ep={self.ep} must divide the tp x cp x dp = {self.stage_size} ranks of a stage"
            )

    @property
    def stage_size(self) -> int:
        """Ranks of one pipeline stage."""
        return self.tp * self.cp * self.dp

    @property
    def world_size(self) -> int:
        return self.stage_size * self.pp

    def coordinates(self, rank: int) -> Coordinates:
        """The place of a global rank. Raises ValueError outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank={rank} is outside the world of {self.world_size} workers")
        return Coordinates(
            layout=self,
            rank=rank,
            tp=rank % self.tp,
            cp=rank // self.tp % self.cp,
            dp=rank // (self.tp * self.cp) % self.dp,
            pp=rank // self.stage_size,
            ep=rank % self.stage_size % self.ep,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Coordinates:
    """One worker's place on every axis; there is no default to forget."""

    layout: ParallelLayout
    rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int

    @property
    def is_leader(self) -> bool:
        """First on every axis over which a replica's data is replicated: it alone fetches for and writes back
        its replica's samples. The driver's dispatch and the worker's write-back use this one predicate."""
        return self.tp == 0 and self.cp == 0 and self.pp == 0
