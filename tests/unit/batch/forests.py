"""Random forests, and their paths token by token."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from nemo_like.batch.forest import ROOT, Forest, TokenRun


def forest_from(parents: Sequence[int]) -> Forest:
    """The forest in which token t follows token ``parents[t]``, or nothing for ROOT."""
    starts = [token for token, parent in enumerate(parents) if parent != token - 1 or parent == ROOT]
    lengths = [stop - start for start, stop in zip(starts, [*starts[1:], len(parents)], strict=True)]
    return Forest(tuple(map(TokenRun, lengths, [parents[start] for start in starts])))


@st.composite
def forests(draw: st.DrawFn, max_runs: int = 6, max_length: int = 7) -> Forest:
    """Forests of at least one token."""
    runs, num_tokens = [TokenRun(draw(st.integers(1, max_length)))], 0
    for _ in range(draw(st.integers(0, max_runs - 1))):
        num_tokens += runs[-1].length
        runs.append(TokenRun(draw(st.integers(1, max_length)), draw(st.integers(ROOT, num_tokens - 1))))
    return Forest(tuple(runs))


def path_of(token: int, parents: list[int]) -> list[int]:
    """Return the tokens from the root to ``token``."""
    path = [token]
    while (parent := parents[path[-1]]) != ROOT:
        path.append(parent)
    return path[::-1]
