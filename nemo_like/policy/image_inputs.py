"""The images of a batch, on their way from the data plane's columns to a model with a vision tower.

    columns, a value per prompt ──▶ of a micro-batch: each image once ──▶ vision tower
                                          └── which of them its rows have, in their order ──▶ language model

A group's samples have one copy of their prompt's images, which the vision tower sees once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

# From a sample's tokens [1, T] and the patches of its images [k, 3] to the places that rotary embeddings
# encode, [3, 1, T] in time, height and width, and how far text after the images is ahead of its index.
RopeIndex = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of a micro-batch."""

    pixel_values: Tensor  # [patches of all distinct images, values of a patch] float32
    grids: Tensor  # [distinct images, 3] int64: patches in time, height and width
    order: tuple[int, ...]  # the image at each place where the rows have one; samples may have one in common

    @classmethod
    def of_prompts(
        cls, prompts: Sequence[int], pixel_values: Sequence[Any], grids: Sequence[Any]
    ) -> Self | None:
        """Collect the images of rows that begin with these prompts; None when they have no image.

        ``pixel_values[p]`` and ``grids[p]`` are the columns' values of prompt p, a list of arrays each.
        """
        first: dict[int, int] = {}  # by prompt, the number of its first image
        num_images = 0
        for prompt in prompts:
            if prompt not in first:
                first[prompt] = num_images
                num_images += len(grids[prompt])
        if not num_images:
            return None
        return cls(
            pixel_values=torch.cat([torch.tensor(one) for prompt in first for one in pixel_values[prompt]]),
            grids=torch.stack([torch.tensor(one) for prompt in first for one in grids[prompt]]),
            order=tuple(first[prompt] + number for prompt in prompts for number in range(len(grids[prompt]))),
        )


def rope_positions(
    token_ids: Tensor,
    lengths: Tensor,
    prompt_index: Sequence[int],
    grids: Sequence[Any],
    rope_index: RopeIndex,
) -> Tensor:
    """Return the positions of packed tokens, [sum of lengths, 3] int64: time, height and width.

    ``token_ids`` are the samples' tokens end to end, [sum of lengths]; ``grids[prompt_index[i]]`` are the
    images of sample i, which are all in its prompt.
    """
    starts = lengths.cumsum(0) - lengths
    positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
    positions = positions[:, None].repeat(1, 3)
    of_prompts: dict[int, tuple[Tensor, int]] = {}
    for prompt, start, length in zip(prompt_index, starts.tolist(), lengths.tolist(), strict=True):
        if not len(grids[prompt]):
            continue
        if prompt not in of_prompts:
            of_sample, ahead = rope_index(
                token_ids[start : start + length][None].to(torch.int64),
                torch.stack([torch.tensor(one) for one in grids[prompt]]),
            )
            of_prompts[prompt] = of_sample[:, 0].T, int(ahead)
        known, ahead = of_prompts[prompt]
        # Samples of a group differ after their prompt only, where the text goes on by 1 for each token.
        positions[start : start + length] += ahead
        positions[start : start + min(length, len(known))] = known[:length]
    return positions
