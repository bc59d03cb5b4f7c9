"""Turns an image into the tokens and columns that a model with a vision tower reads.

<image> in a prompt ──▶ the checkpoint's own tokens around one token for the image ──▶ one for each feature
an image ─────────────▶ patches and their grid, which are columns of the data plane ────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from nemo_like.data.image_marks import in_texts
from nemo_like.data.images import IMAGE_MARK
from nemo_like.data.interface import Prompt
from nemo_like.models.model_info import has_vision_tower
from nemo_like.models.remote_code import loading_arguments

if TYPE_CHECKING:
    from PIL.Image import Image

# Names of the image processor's outputs, and of the columns.
_PIXELS, _GRID = "pixel_values", "image_grid_thw"


class Vision:
    """The image processor of a checkpoint, and the tokens that stand for an image."""

    def __init__(self, checkpoint: Path, token_of: Any) -> None:
        """Load the image processor; ``token_of`` returns the text of a token id."""
        from transformers import AutoImageProcessor

        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        self._processor: Any = AutoImageProcessor.from_pretrained(
            checkpoint, local_files_only=True, **loading_arguments()
        )
        self._features_of: int = self._processor.merge_size**2  # patches per feature
        self.image_token: int = config["image_token_id"]
        names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
        self._mark = "".join(token_of(config[name]) for name in names if config.get(name) is not None)

    @classmethod
    def of(cls, checkpoint: Path, token_of: Any) -> Self | None:
        """Return the vision of a checkpoint directory; None when the model has no vision tower."""
        return cls(checkpoint, token_of) if has_vision_tower(str(checkpoint)) else None

    def own_prompt(self, prompt: Prompt) -> Prompt:
        """Return the prompt with the checkpoint's own tokens instead of ``<image>``."""
        return in_texts(prompt, IMAGE_MARK, self._mark)

    def own_text(self, text: str) -> str:
        """Return an observation with the checkpoint's own tokens instead of ``<image>``."""
        return text.replace(IMAGE_MARK, self._mark)

    def num_tokens(self, size: tuple[int, int]) -> int:
        """Return how many tokens an image of this (height, width) in pixels takes."""
        return int(self._processor.get_number_of_image_patches(*size, {})) // self._features_of

    def columns(self, images: Sequence[Image]) -> dict[str, list[np.ndarray]]:
        """Return the columns of a prompt's images: pixel_values, [patches, values of a patch] float32 each,
        and image_grid_thw, [3] int64 each."""
        seen = [self._processor(images=[image], return_tensors="np") for image in images]
        return {
            _PIXELS: [np.asarray(one[_PIXELS], np.float32) for one in seen],
            _GRID: [np.asarray(one[_GRID][0], np.int64) for one in seen],
        }

    def expanded(self, token_ids: Sequence[int], columns: dict[str, list[np.ndarray]]) -> list[int]:
        """Return a prompt's tokens with each image's single token repeated once per feature of the image."""
        counts = iter([int(grid.prod()) // self._features_of for grid in columns[_GRID]])
        return [
            one for token in token_ids for one in [token] * (next(counts) if token == self.image_token else 1)
        ]
