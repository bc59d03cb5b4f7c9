"""In which order the samples of a step train. Standard library only."""

from __future__ import annotations


def by_generation(num_prompts: int, num_generations: int, kept_together: int = 1) -> list[int]:
    """Positions, in a batch ordered by (prompt, generation), of the same samples by (generation, prompt),
    where so many generations of a prompt stay neighbours.

    An update on few samples of many prompts has a less noisy gradient than one on all samples of a few.
    """
    return [
        prompt * num_generations + generation
        for first in range(0, num_generations, kept_together)
        for prompt in range(num_prompts)
        for generation in range(first, min(first + kept_together, num_generations))
    ]
