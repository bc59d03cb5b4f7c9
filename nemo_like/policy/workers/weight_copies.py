"""Compares ranks' copies of weights by their digests, so that no weight travels."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence

import torch.distributed as dist

from nemo_like.policy.loss.update_watch import WeightCopies
from nemo_like.tripwires.weight_digests import WeightsDigest

# The first rank of a set of copies, and the sum of the words of each of its weights, by name.
CopySums = tuple[int, dict[str, int]]
_DIGEST_BYTES = 5  # exact as float64
_ELSEWHERE = -(2.0**60)  # in place of a digest of other ranks' copies


def copy_sums(copies: Sequence[WeightCopies]) -> list[CopySums]:
    """Return this rank's sums of each set of copies."""
    found: list[CopySums] = []
    for one in copies:
        digest = WeightsDigest()
        digest.add_all(one.weights)
        found.append((one.first_rank, digest.by_name()))
    return found


def digest_slots(sums: Sequence[CopySums], num_ranks: int) -> list[float]:
    """Return this rank's numbers for an exchange of the greatest: for each set of copies and each rank that
    may be the first of one, the digest and its negative."""
    slots: list[float] = []
    for first_rank, named in sums:
        own = [_ELSEWHERE] * (2 * num_ranks)
        content = repr(sorted(named.items())).encode()
        digest = int.from_bytes(hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest(), "big")
        own[2 * first_rank], own[2 * first_rank + 1] = float(digest), -float(digest)
        slots += own
    return slots


def num_unequal(slots: Sequence[float]) -> int:
    """Return how many sets have a greatest digest that is not the least, from the greatest of all ranks'
    ``digest_slots``."""
    pairs = zip(slots[::2], slots[1::2], strict=True)
    return sum(high != -low for high, low in pairs if high != _ELSEWHERE)


def unequal_names(sums: Sequence[CopySums]) -> set[str]:
    """Return the names of the weights whose copies differ; every rank calls it."""
    everyone: list[Sequence[CopySums]] = [sums] * dist.get_world_size()
    dist.all_gather_object(everyone, list(sums))
    seen: dict[tuple[int, int, str], set[int]] = defaultdict(set)
    for of_rank in everyone:
        for index, (first_rank, named) in enumerate(of_rank):
            for name, value in named.items():
                seen[index, first_rank, name].add(value)
    return {name for (*_, name), values in seen.items() if len(values) > 1}
