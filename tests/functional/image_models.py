"""Tiny vision-language checkpoints, pictures, batches with images, and the dense model that reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from scripts.demo_model.shapes import SIDE, shapes
from scripts.demo_model.tiny_tokenizer import PAD, vocabulary
from scripts.demo_model.tiny_vlm import VISION_TOKENS, image_processor, save_vlm, tiny_vlm_config
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import GROUP_SIZE, VOCAB_SIZE

START, END, IMAGE, VIDEO = (vocabulary(VISION_TOKENS)[token] for token in VISION_TOKENS)
FORBIDDEN = [IMAGE, VIDEO]
PADDING = vocabulary(VISION_TOKENS)[PAD]


def make_checkpoint(path: Path, architecture: str = "qwen2_5_vl") -> Path:
    """A random model whose next-token distributions are far from uniform."""
    torch.manual_seed(7)
    config = tiny_vlm_config(architecture)
    config.text_config.vocab_size = VOCAB_SIZE
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.08)
            else:
                parameter.add_(0.1 * torch.randn_like(parameter))
    save_vlm(model, path)
    return path


class Seen(NamedTuple):
    """An image as a model reads it."""

    pixels: np.ndarray  # [patches, values of a patch] float32
    grid: np.ndarray  # [3] int64

    @classmethod
    def of(cls, draws: random.Random, side: int) -> Self:
        """A picture of ``side`` pixels in height."""
        seen = image_processor()([shapes(draws, SIDE)[0].resize((SIDE, side))], return_tensors="np")
        return cls(
            np.asarray(seen["pixel_values"], np.float32), np.asarray(seen["image_grid_thw"][0], np.int64)
        )

    @property
    def tokens(self) -> list[int]:
        return [START, *[IMAGE] * (int(self.grid.prod()) // 4), END]


def image_batch(images_of_groups: Sequence[int], seed: int = 3) -> dict[str, Any]:
    """Groups of four samples with a prompt of so many images, of two sizes, and 3 to 9 generated tokens.

    The last two samples of a group have an observation between their responses, with an image of its own;
    the last one of the first group has two. The first sample begins by saying the padding token.
    """
    rng, draws = np.random.default_rng(seed), random.Random(seed)
    ids, masks, lengths = [], [], []
    prompts: list[list[Seen]] = []
    observed: list[list[Seen]] = []
    text = [token for token in range(3, 40) if token not in (START, END, IMAGE, VIDEO)]
    num_prompt = []
    for num_images in images_of_groups:
        prompts.append([Seen.of(draws, side) for side in [SIDE, SIDE - 28][:num_images]])
        prompt = [int(rng.choice(text))]
        for seen in prompts[-1]:
            prompt += seen.tokens
        prompt += rng.choice(text, 2).tolist()
        for generation in range(GROUP_SIZE):
            response = rng.choice(text, int(rng.integers(3, 10))).tolist()
            sampled = [1] * len(response)
            num_observed = (generation >= GROUP_SIZE - 2) + (
                generation == GROUP_SIZE - 1 and len(prompts) == 1
            )
            sides = [SIDE - 28, SIDE][:num_observed]
            observed.append([Seen.of(draws, side) for side in sides])
            if sides:
                observation = [token for seen in observed[-1] for token in seen.tokens] + [int(text[0])]
                response[2:2] = observation
                sampled[2:2] = [0] * len(observation)
            if not lengths:
                response[0] = PADDING
            ids += prompt + response
            masks += [0] * len(prompt) + sampled
            lengths.append(len(prompt) + len(response))
            num_prompt.append(len(prompt))
    num_samples = len(lengths)
    mask = np.array(masks, np.uint8)
    return {
        "lengths": lengths,
        "columns": {
            "input_ids": np.array(ids, np.int32),
            "response_mask": mask,
            "generation_logprobs": (-rng.random(len(ids)) * mask).astype(np.float32),
            "pixel_values": [[seen.pixels for seen in one] for one in prompts],
            "image_grid_thw": [[seen.grid for seen in one] for one in prompts],
            "observed_pixel_values": [[seen.pixels for seen in one] for one in observed],
            "observed_image_grid_thw": [[seen.grid for seen in one] for one in observed],
        },
        "tags": {
            "advantage": [float(value) for value in rng.normal(size=num_samples)],
            "sample_mask": [float(index % 5 != 3) for index in range(num_samples)],
            "num_response_tokens": [int(one.sum()) for one in np.split(mask, np.cumsum(lengths)[:-1])],
            "num_prompt_tokens": num_prompt,
            "group_id": [row // GROUP_SIZE for row in range(num_samples)],
        },
    }


class DenseImageReference(DenseReference):
    """transformers' own forward pass, one sample with its images at a time."""

    loader = AutoModelForImageTextToText

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        """Of sample ``row``, whose tokens are ``ids`` [1, T]: [1, T, vocabulary]."""
        columns, images = batch["columns"], dict[str, Any]()
        pixels = [*columns["pixel_values"][row // GROUP_SIZE], *columns["observed_pixel_values"][row]]
        grids = [*columns["image_grid_thw"][row // GROUP_SIZE], *columns["observed_image_grid_thw"][row]]
        if pixels:
            images = {
                "pixel_values": torch.from_numpy(np.concatenate(pixels)),
                "image_grid_thw": torch.from_numpy(np.stack(grids)),
                "mm_token_type_ids": (ids == IMAGE).int(),
            }
        logits: Tensor = self.model(ids, **images).logits
        logits[..., FORBIDDEN] = -1e30
        return logits
