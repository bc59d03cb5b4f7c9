"""The token runs of the samples of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from nemo_like.batch.forest import Forest, PathPiece, TokenRun


class TokenRuns:
    """The runs of N samples, one after the other; a sample without branches is one run.

    ``gaps`` is the column parent_gaps of all samples' tokens, packed [sum of lengths], or None where no
    sample has branches. ``lengths`` is [N] int64. All are on the host.
    """

    def __init__(self, lengths: Tensor, gaps: Tensor | None) -> None:
        self._offsets, self._gaps = lengths.cumsum(0) - lengths, gaps
        starts = self._offsets
        if gaps is not None:
            starts = torch.cat((starts, gaps.nonzero().squeeze(1))).unique()
        self.starts = starts  # [R] int64, of each run in the packed columns
        self.lengths = torch.diff(starts, append=lengths.sum()[None])  # [R] int64
        firsts = torch.searchsorted(starts, self._offsets)
        self.counts = torch.diff(firsts, append=torch.tensor([len(starts)]))  # [N] int64, runs per sample
        self.firsts = firsts  # [N] int64, the number of each sample's first run

    def __len__(self) -> int:
        return len(self.starts)

    def of_samples(self, values: Tensor) -> Tensor:
        """Return for each run its sample's value, [R], of one value per sample, [N]."""
        return torch.repeat_interleave(values, self.counts)

    def of_tokens(self, indexes: Tensor) -> Tensor:
        """Return the numbers of the runs to which tokens at these indexes in the packed columns belong."""
        return torch.searchsorted(self.starts, indexes, right=True) - 1

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over each run, [R] int64, of packed integers or flags, [sum of lengths]."""
        owner = torch.repeat_interleave(torch.arange(len(self)), self.lengths)
        return torch.zeros(len(self), dtype=torch.int64).index_add_(0, owner, values.to(torch.int64))

    def forest(self, sample: int) -> Forest:
        """Return the forest of one sample's tokens."""
        return self._forests[sample]

    def paths(self) -> list[Tensor]:
        """Return the path of each run's last token, as indexes in the packed columns."""
        of_samples = zip(self._offsets.tolist(), self._forests, strict=True)
        return [offset + path_tokens(path) for offset, forest in of_samples for path in forest.paths()]

    @cached_property
    def _forests(self) -> list[Forest]:
        within = self.starts - self.of_samples(self._offsets)
        gaps = torch.zeros_like(self.starts) if self._gaps is None else self._gaps[self.starts]
        parents = within - 1 - gaps  # ROOT for a sample's first token
        runs = list(map(TokenRun, self.lengths.tolist(), parents.tolist()))
        ends = (self.firsts + self.counts).tolist()
        return [Forest(tuple(runs[first:end])) for first, end in zip(self.firsts.tolist(), ends, strict=True)]


def path_tokens(path: Sequence[PathPiece]) -> Tensor:
    """Return the tokens of a path's pieces, [their number] int64."""
    return torch.cat([torch.arange(piece.start, piece.stop) for piece in path])


def piece_indexes(starts: Tensor, lengths: Tensor) -> Tensor:
    """Return the numbers starts[i], starts[i] + 1, ... of every piece, piece after piece, [sum of lengths]
    int64."""
    ends = lengths.cumsum(0)
    return torch.arange(int(ends[-1])) + torch.repeat_interleave(starts - ends + lengths, lengths)
