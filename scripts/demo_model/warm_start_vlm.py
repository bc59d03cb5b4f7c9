"""A short supervised warm start of the tiny vision-language model, for GRPO to learn from."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from .shapes import MAX_RED, PROMPT, SIDE, shapes
from .tiny_tokenizer import EOS, vocabulary
from .tiny_vlm import MERGE, PATCH, VISION_TOKENS, image_processor, tiny_vlm_config
from .warm_start import WarmStart, WarmStartProgress

_LEARNING_RATE = 1e-3  # 3e-3 never learns
_WARMUP_STEPS = 20
_BATCH_SIZE = 64
_MAX_GRAD_NORM = 1.0
_MAX_STEPS = 1500
_LOOK_STEPS = 10
_NUM_HELD_OUT = 256
_HELD_OUT_SEED = 10**6  # of pictures that no seed of training makes


def warm_start(
    seed: int, target_accuracy: float, on_progress: Callable[[WarmStartProgress], None]
) -> WarmStart:
    """Teach a model to count until its held-out accuracy, sampled at temperature 1, is ``target_accuracy``.

    Raises RuntimeError when 1500 steps do not reach the target.
    """
    started_s = time.perf_counter()
    torch.manual_seed(seed)
    rng = random.Random(seed)
    model = AutoModelForImageTextToText.from_config(tiny_vlm_config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARMUP_STEPS))
    held_out = _batch(random.Random(_HELD_OUT_SEED), _NUM_HELD_OUT)
    accuracy = 0.0
    for step in range(1, _MAX_STEPS + 1):
        inputs = _batch(rng, _BATCH_SIZE)
        targets = inputs["input_ids"][:, -2:]
        loss = F.cross_entropy(_logits(model, inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), _MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        if step % _LOOK_STEPS == 0:
            accuracy = _accuracy(model, held_out)
        on_progress(WarmStartProgress(step, loss.item(), accuracy))
        if accuracy >= target_accuracy:
            return WarmStart(model, step, accuracy, time.perf_counter() - started_s)
    raise RuntimeError(f"the warm start reached {accuracy:.2f} in {_MAX_STEPS} steps; try another seed")


@torch.no_grad()
def _accuracy(model: torch.nn.Module, inputs: dict[str, Tensor]) -> float:
    """Return the mean probability of the right answer, digit and eos."""
    logprobs = _logits(model, inputs).log_softmax(-1)
    targets = inputs["input_ids"][:, -2:, None]
    return logprobs.gather(2, targets).sum((1, 2)).exp().mean().item()


def _logits(model: torch.nn.Module, inputs: dict[str, Tensor]) -> Tensor:
    """Return the logits of the two tokens of the answer, [samples, 2, vocabulary]."""
    logits: Tensor = model(**inputs, use_cache=False, logits_to_keep=3).logits[:, :-1]
    return logits


def _batch(rng: random.Random, count: int) -> dict[str, Tensor]:
    """Return the model's inputs for ``count`` pictures, each followed by its question and answer."""
    pictures, counts = zip(*[shapes(rng, SIDE) for _ in range(count)], strict=True)
    seen = image_processor()(list(pictures), return_tensors="pt")
    ids = vocabulary(VISION_TOKENS)
    start, end, image, _ = (ids[token] for token in VISION_TOKENS)
    question = [start, *[image] * (SIDE // (PATCH * MERGE)) ** 2, end]
    question += [ids[character] for character in PROMPT.removeprefix("<image>")]
    digits = [ids[str(number)] for number in range(MAX_RED + 1)]
    input_ids = torch.tensor([[*question, digits[number], ids[EOS]] for number in counts])
    return {
        "input_ids": input_ids,
        "mm_token_type_ids": (input_ids == image).int(),
        "pixel_values": seen["pixel_values"],
        "image_grid_thw": seen["image_grid_thw"],
    }
