"""``Forest``: which token each token follows, where samples have tokens in common. Standard library only.

    run 0   0 1 2 3 4 5          a prompt and a first answer
    run 1       └ 6 7 8          follows token 2
    run 2           └ 9          follows token 7
    run 3   10 11                a root: nothing is before it

Runs lie end to end. The path of a token is the token itself and all that is before it: in its run, then up to
the token that its run follows, and so on to a root. A token attends to its path, and its position is the
number of the other tokens on it. A sample by itself is one run. The samples of a prompt are a forest, of
which the prompt is a part once, and so is the session of an agent, whose calls go on from one another.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

ROOT = -1  # in place of the token that a run follows, where nothing is before it


class TokenRun(NamedTuple):
    """Tokens that follow one another, the first of which follows token ``parent``, or nothing for ROOT."""

    length: int
    parent: int = ROOT


class PathPiece(NamedTuple):
    """The tokens from ``start`` to before ``stop``."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Forest:
    """Token runs, end to end.

    Raises ValueError for a run without tokens, and for a run that follows a token of its own or of a later
    run.
    """

    runs: tuple[TokenRun, ...]

    def __post_init__(self) -> None:
        for number, (run, start) in enumerate(zip(self.runs, self.starts, strict=True)):
            if run.length < 1:
                raise ValueError(f"run {number} has {run.length} tokens; a run has at least one")
            if not ROOT <= run.parent < start:
                raise ValueError(
                    f"run {number} follows token {run.parent}, which is not before its first, token {start}; "
                    f"a run follows an earlier token, or nothing ({ROOT})"
                )

    def parents(self) -> list[int]:
        """Return the token that each token follows; ROOT for the first of a tree."""
        found: list[int] = []
        for run in self.runs:
            found += (run.parent, *range(len(found), len(found) + run.length - 1))
        return found

    @property
    def num_tokens(self) -> int:
        return sum([run.length for run in self.runs])

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each run."""
        return tuple(accumulate([run.length for run in self.runs[:-1]], initial=0))

    def depths(self) -> list[int]:
        """Return the position of each run's first token."""
        starts = self.starts
        depths: list[int] = []
        for run in self.runs:
            above = _run_of(run.parent, starts)
            depths.append(0 if above is None else depths[above] + run.parent - starts[above] + 1)
        return depths

    @property
    def longest_path(self) -> int:
        """How many tokens the longest path has."""
        return max([depth + run.length for depth, run in zip(self.depths(), self.runs, strict=True)])

    def paths(self) -> list[list[PathPiece]]:
        """Return the path of each run's last token, from its root on."""
        starts = self.starts
        paths: list[list[PathPiece]] = []
        for run, start in zip(self.runs, starts, strict=True):
            above = _run_of(run.parent, starts)
            before = [] if above is None else _up_to(paths[above], run.parent)
            paths.append([*before, PathPiece(start, start + run.length)])
        return paths

    def leaves(self) -> list[int]:
        """Return the runs whose last tokens no run follows: their paths have all tokens of the forest."""
        followed = {run.parent for run in self.runs}
        ends = accumulate([run.length for run in self.runs])
        return [number for number, end in enumerate(ends) if end - 1 not in followed]


class Outputs(NamedTuple):
    """Where a model's outputs predict neighbouring tokens of a sample.

    The output in slot ``first_slot`` predicts ``first_token``; nothing does, for ROOT. The outputs in the
    slots from ``slot`` on predict the tokens after it.
    """

    sample: int
    first_token: int
    num_tokens: int
    first_slot: int
    slot: int


class Origin(NamedTuple):
    """Whose tokens a run of a row has: those of a sample from ``first_token`` on."""

    sample: int
    first_token: int


@dataclass(frozen=True, slots=True)
class ForestRow:
    """Samples in one row of slots, with one slot for tokens that neighbours have in common."""

    forest: Forest  # its tokens are slots
    origins: tuple[Origin, ...]  # of each run
    outputs: tuple[Outputs, ...]  # for all tokens of each sample that it does not share with an earlier one
    end_slots: tuple[
        int, ...
    ]  # of the last token of each run of each sample; ROOT where it is not in the row

    @classmethod
    def of(cls, samples: Sequence[Forest], shared: Sequence[int], num_entering: Sequence[int]) -> ForestRow:
        """Join samples: of sample i the first ``num_entering[i]`` tokens enter the model, and the first
        ``shared[i]`` of these have the slots that they have for sample i - 1.

        Raises ValueError where shared tokens are not in the first runs of both samples.
        """
        joined = _Joined()
        for number, (sample, common, entering) in enumerate(zip(samples, shared, num_entering, strict=True)):
            joined.add(number, sample, common, entering)
        return cls(
            Forest(tuple(joined.runs)), tuple(joined.origins), tuple(joined.outputs), tuple(joined.end_slots)
        )


class _Joined:
    """Joins samples, one after the other."""

    def __init__(self) -> None:
        self.runs: list[TokenRun] = []
        self.origins: list[Origin] = []
        self.outputs: list[Outputs] = []
        self.end_slots: list[int] = []
        self._num_slots = 0
        self._slots: list[int] = []  # where neighbouring tokens of the latest sample begin in the row,
        self._tokens: list[int] = []  # and which tokens of the sample these are
        self._num_shareable = 0  # how many of its first tokens are in the row, in its first run

    def add(self, number: int, sample: Forest, shared: int, entering: int) -> None:
        if shared > min(self._num_shareable, entering, sample.runs[0].length):
            raise ValueError(
                f"{shared} tokens are shared with the sample before, of which {self._num_shareable} tokens "
                f"are in the first run; the sample has {sample.runs[0].length} there"
            )
        kept = sum(token < shared for token in self._tokens)
        self._slots, self._tokens = self._slots[:kept], self._tokens[:kept]
        self._num_shareable = min(entering, sample.runs[0].length)
        for run, start in zip(sample.runs, sample.starts, strict=True):
            begin = max(start, shared)
            parent = begin - 1 if begin > start else run.parent
            stop = start + run.length
            self._add_run(Origin(number, begin), parent, stop, entering)
            self.end_slots.append(self._slot_of(stop - 1) if stop <= entering else ROOT)

    def _add_run(self, origin: Origin, parent: int, stop: int, entering: int) -> None:
        """Add the tokens of a sample from ``origin`` to before ``stop``, which follow token ``parent``."""
        if origin.first_token == stop:
            return
        before = ROOT if parent == ROOT else self._slot_of(parent)
        self.outputs.append(Outputs(*origin, stop - origin.first_token, before, self._num_slots))
        if (length := min(stop, entering) - origin.first_token) > 0:
            self._slots.append(self._num_slots)
            self._tokens.append(origin.first_token)
            self.runs.append(TokenRun(length, before))
            self.origins.append(origin)
            self._num_slots += length

    def _slot_of(self, token: int) -> int:
        place = bisect_right(self._tokens, token) - 1
        return self._slots[place] + token - self._tokens[place]


def _run_of(token: int, starts: Sequence[int]) -> int | None:
    return None if token == ROOT else bisect_right(starts, token) - 1


def _up_to(path: list[PathPiece], token: int) -> list[PathPiece]:
    """Return the path of a token of its last piece."""
    *before, last = path
    return [*before, PathPiece(last.start, token + 1)]
