"""Sampling seeds that depend on nothing but what is sampled, so that runs repeat and steps can be redone."""

from __future__ import annotations

import hashlib

from nemo_like.rollout.prompts import RolloutMode


def response_seeds(
    run_seed: int, mode: RolloutMode, step: int, position: int, num_generations: int
) -> tuple[int, ...]:
    """Seeds of the first responses to the prompt at ``position`` of a step: consecutive integers below 2**62.

    Groups get disjoint ranges but for hash collisions (probability about P**2 / 2**60 per run).
    """
    first = _hashed(f"{run_seed}/{mode.name}/{step}/{position}") // num_generations * num_generations
    return tuple(range(first, first + num_generations))


def turn_seed(first_turn_seed: int, turn: int) -> int:
    """Seed of a sample's later response, from that of its first; ``turn`` counts from 1."""
    return _hashed(f"{first_turn_seed}/{turn}")


def _hashed(text: str) -> int:
    """Below 2**62."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2
