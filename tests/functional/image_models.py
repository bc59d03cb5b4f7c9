"""Tiny vision-language checkpoints, pictures, batches with images, and the dense model that reads them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from scripts.demo_model.shapes import SIDE, shapes
from scripts.demo_model.tiny_tokenizer import vocabulary
from scripts.demo_model.tiny_vlm import VISION_TOKENS, image_processor, save_vlm, tiny_vlm_config
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import GROUP_SIZE, VOCAB_SIZE

START, END, IMAGE, VIDEO = (vocabulary(VISION_TOKENS)[token] for token in VISION_TOKENS)
FORBIDDEN = [IMAGE, VIDEO]


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


def image_batch(images_of_groups: Sequence[int], seed: int = 3) -> dict[str, Any]:
    """Groups of four samples with a prompt of so many images, of two sizes, and 3 to 9 generated tokens."""
    rng, draws = np.random.default_rng(seed), random.Random(seed)
    processor, ids, masks, lengths = image_processor(), [], [], []
    pixels: list[list[np.ndarray]] = []
    grids: list[list[np.ndarray]] = []
    text = [token for token in range(3, 40) if token not in (START, END, IMAGE, VIDEO)]
    num_prompt = []
    for num_images in images_of_groups:
        sides = [SIDE, SIDE - 28][:num_images]
        seen = [
            processor([shapes(draws, SIDE)[0].resize((SIDE, side))], return_tensors="np") for side in sides
        ]
        pixels.append([np.asarray(one["pixel_values"], np.float32) for one in seen])
        grids.append([np.asarray(one["image_grid_thw"][0], np.int64) for one in seen])
        prompt = [int(rng.choice(text))]
        for grid in grids[-1]:
            prompt += [START, *[IMAGE] * (int(grid.prod()) // 4), END]
        prompt += rng.choice(text, 2).tolist()
        for _ in range(GROUP_SIZE):
            response = rng.choice(text, int(rng.integers(3, 10))).tolist()
            ids += prompt + response
            masks += [0] * len(prompt) + [1] * len(response)
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
            "pixel_values": pixels,
            "image_grid_thw": grids,
        },
        "tags": {
            "advantage": [float(value) for value in rng.normal(size=num_samples)],
            "sample_mask": [float(index % 5 != 3) for index in range(num_samples)],
            "num_response_tokens": [
                length - prompt for length, prompt in zip(lengths, num_prompt, strict=True)
            ],
            "num_prompt_tokens": num_prompt,
            "group_id": [row // GROUP_SIZE for row in range(num_samples)],
        },
    }


class DenseImageReference(DenseReference):
    """transformers' own forward pass, one sample with its images at a time."""

    loader = AutoModelForImageTextToText

    def logits(self, batch: dict[str, Any], row: int, ids: Tensor) -> Tensor:
        """Of sample ``row``, whose tokens are ``ids`` [1, T]: [1, T, vocabulary]."""
        pixels = batch["columns"]["pixel_values"][row // GROUP_SIZE]
        images: dict[str, Any] = {}
        if pixels:
            images = {
                "pixel_values": torch.from_numpy(np.concatenate(pixels)),
                "image_grid_thw": torch.from_numpy(
                    np.stack(batch["columns"]["image_grid_thw"][row // GROUP_SIZE])
                ),
                "mm_token_type_ids": (ids == IMAGE).int(),
            }
        logits: Tensor = self.model(ids, **images).logits
        logits[..., FORBIDDEN] = -1e30
        return logits


def varied(turn: Any) -> float:
    """A reward that differs between the samples of a group."""
    return float(sum(map(ord, turn.response)) % 5)
