"""In which order the samples of a step train. Standard library only."""

from __future__ import annotations


def by_generation(num_prompts: int, num_generations: int) -> list[int]:
    """Positions, in a batch ordered by (prompt, generation), of the same samples by (generation, prompt).

    Consecutive samples then belong to different prompts. An update on few samples of many prompts
    has a less noisy gradient than one on all samples of a few prompts.
    """
    return [
        prompt * num_generations + generation
        for generation in range(num_generations)
        for prompt in range(num_prompts)
    ]
