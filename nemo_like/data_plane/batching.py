"""Cutting a rank's samples into micro-batches, on lengths alone. Standard library only.

A strategy gets the lengths of every rank's samples and returns, for every rank, the same number of
micro-batches, each a list of indices into that rank's samples. Every sample is in exactly one, and
none is empty: unequal numbers would leave a rank alone in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Lengths = Sequence[Sequence[int]]  # [rank][sample] tokens
MicroBatches = list[list[list[int]]]  # [rank][micro-batch][index of a sample]
Strategy = Callable[[Lengths], MicroBatches]


def fixed_size(size: int) -> Strategy:
    """At most ``size`` samples each, longest first, so that padding is small on all ranks alike."""
    if size < 1:
        raise ValueError(f"micro_batch_size={size} must be at least 1")

    def split(lengths: Lengths) -> MicroBatches:
        count = max(-(-len(rank) // size) for rank in lengths)
        return [_cut_evenly(_longest_first(rank), count) for rank in lengths]

    return split


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _longest_first(lengths: Sequence[int]) -> list[int]:
    return sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))


def _cut_evenly(indices: list[int], count: int) -> list[list[int]]:
    """``count`` consecutive groups whose sizes differ by at most one."""
    if len(indices) < count:
        raise ValueError(f"{len(indices)} samples can't fill {count} micro-batches")
    bounds = [len(indices) * group // count for group in range(count + 1)]
    return [indices[bounds[group] : bounds[group + 1]] for group in range(count)]
