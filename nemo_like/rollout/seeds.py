"""Sampling seeds that depend on nothing but what is sampled, so that runs repeat and steps can be redone."""

from __future__ import annotations

import hashlib

from nemo_like.rollout.prompts import RolloutMode


def response_seeds(
    run_seed: int, mode: RolloutMode, step: int, position: int, num_generations: int
) -> tuple[int, ...]:
    """Seeds of the responses to the prompt at ``position`` of a step: consecutive integers below 2**62.

    Groups get disjoint ranges but for hash collisions (probability about P**2 / 2**60 per run).
    """
    digest = hashlib.blake2b(f"{run_seed}/{mode.name}/{step}/{position}".encode(), digest_size=8).digest()
    first = (int.from_bytes(digest, "big") >> 2) // num_generations * num_generations
    return tuple(range(first, first + num_generations))
