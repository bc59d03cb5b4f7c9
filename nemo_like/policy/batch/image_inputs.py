"""The images of a batch, on their way from the data plane's columns to a model with a vision tower.

    columns of the prompts' images  ──▶ each distinct image of a micro-batch, once ──▶ vision tower
    and of the samples' observations         └── which image is at each place of the rows ──▶ language model

The samples of a group share one copy of their prompt's images, which the vision tower sees once per
micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from nemo_like.batch.columns import (
    IMAGE_COLUMNS,
    IMAGE_GRIDS,
    OBSERVED_IMAGE_GRIDS,
    OBSERVED_PIXEL_VALUES,
    PIXEL_VALUES,
    Column,
)

# Takes a sample's tokens [1, T] and the patches of its images [k, 3]. Returns the positions that rotary
# embeddings encode, [3, 1, T] in time, height and width, and how far ahead of its index text after images is.
RopeIndex = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class _Image(NamedTuple):
    key: Hashable  # the same for an image that several samples have in common
    pixel_values: Any  # [patches, values of a patch] float32
    grid: Any  # [3] int64: patches in time, height and width


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of a micro-batch."""

    pixel_values: Tensor  # [patches of all distinct images, values of a patch] float32
    grids: Tensor  # [distinct images, 3] int64: patches in time, height and width
    order: tuple[int, ...]  # the distinct image at each place of an image in the rows

    @classmethod
    def of(cls, images: Iterable[_Image]) -> Self | None:
        """Collect the distinct images of a micro-batch, and their order in its rows; return None when there
        are none."""
        first: dict[Hashable, int] = {}
        distinct: list[_Image] = []
        order = []
        for image in images:
            if image.key not in first:
                first[image.key] = len(distinct)
                distinct.append(image)
            order.append(first[image.key])
        if not distinct:
            return None
        return cls(
            pixel_values=torch.cat([torch.tensor(image.pixel_values) for image in distinct]),
            grids=torch.stack([torch.tensor(image.grid) for image in distinct]),
            order=tuple(order),
        )


class BatchImages:
    """The images of N samples, from the values of their columns."""

    def __init__(self, prompt_index: Sequence[int], columns: Mapping[Column, Sequence[Any]]) -> None:
        """Keep the values of ``IMAGE_COLUMNS``; sample i begins with prompt ``prompt_index[i]``."""
        self._prompt_index = prompt_index
        self._prompts = columns[PIXEL_VALUES], columns[IMAGE_GRIDS]
        self._observed = columns[OBSERVED_PIXEL_VALUES], columns[OBSERVED_IMAGE_GRIDS]

    @classmethod
    def of(cls, prompt_index: Sequence[int], values: Mapping[str, Any]) -> Self | None:
        """Return the images in the column ``values``, by column name; None where there are no such
        columns."""
        if PIXEL_VALUES.name not in values:
            return None
        return cls(prompt_index, {column: values[column.name] for column in IMAGE_COLUMNS})

    def of_rows(self, rows: Sequence[int], shared: Sequence[int]) -> ImageInputs | None:
        """Return the images of the samples ``rows``, one after the other, without the prompts of samples that
        share ``shared[i]`` tokens with the sample before; an empty ``shared`` means that none does."""
        return ImageInputs.of(
            image
            for row, common in zip(rows, shared or repeat(0, len(rows)), strict=True)
            for images in ((self._of_observations,) if common else (self._of_prompt, self._of_observations))
            for image in images(row)
        )

    def rope_positions(self, token_ids: Tensor, lengths: Tensor, rope_index: RopeIndex) -> Tensor:
        """Return the positions of packed tokens, [sum of lengths, 3] int64: time, height and width.

        ``token_ids`` has the samples' tokens end to end, [sum of lengths].
        """
        starts = lengths.cumsum(0) - lengths
        positions = torch.arange(int(lengths.sum())) - torch.repeat_interleave(starts, lengths)
        positions = positions[:, None].repeat(1, 3)
        of_prompts: dict[int, tuple[Tensor, int]] = {}
        for row, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
            observed = [image.grid for image in self._of_observations(row)]
            grids = [*(image.grid for image in self._of_prompt(row)), *observed]
            if not grids:
                continue
            prompt = self._prompt_index[row]
            if observed or prompt not in of_prompts:
                of_sample, ahead = rope_index(
                    token_ids[start : start + length][None].to(torch.int64),
                    torch.stack([torch.tensor(grid) for grid in grids]),
                )
                known = of_sample[:, 0].T, int(ahead)
                if observed:
                    positions[start : start + length] = known[0]
                    continue
                of_prompts[prompt] = known
            of_first, ahead = of_prompts[prompt]
            # Such samples of a group differ after their prompt only, where the text goes on by 1 a token.
            positions[start : start + length] += ahead
            positions[start : start + min(length, len(of_first))] = of_first[:length]
        return positions

    def _of_prompt(self, row: int) -> Iterator[_Image]:
        prompt = self._prompt_index[row]
        return _images("prompt", prompt, *(values[prompt] for values in self._prompts))

    def _of_observations(self, row: int) -> Iterator[_Image]:
        return _images("sample", row, *(values[row] for values in self._observed))


def _images(kind: str, holder: int, pixel_values: Sequence[Any], grids: Sequence[Any]) -> Iterator[_Image]:
    for number, (pixels, grid) in enumerate(zip(pixel_values, grids, strict=True)):
        yield _Image((kind, holder, number), pixels, grid)
